"""The transfer kernels as nvcc compiles them: word widths, sectors, and changes that make them wrong."""

import dataclasses
import re

import codec_oracle as oracle
import numpy as np
import ptxrun
import pytest
import torch
from engine_cases import CONVERSIONS, LAYERS, device_pool, slots_of
from test_transfer_gpu import DEVICE, comes_back, pinned, stream, tools  # noqa: F401 (a fixture)

pytest.importorskip("emulated_cuda.operators")

from emulated_cuda import errors, runtime
from emulated_cuda.memory import ALLOCATOR
from scripts.bench import transfer_gpu
from scripts.bench.attention.cases import Workload
from scripts.bench.attention.inputs import check, make_problem
from scripts.bench.device import CpuDevice
from sgl_kvpool.transfer.engines import GPU_ENGINES
from sgl_kvpool.transfer.plan import TransferPlan
from sgl_kvpool.transfer.slots import Transfer, packed_view

pytestmark = [pytest.mark.gpu, pytest.mark.quick]
#: Bytes of a word, by its type's name in the names of copy kernels.
WORDS = {"NS_7Bytes16E": 16, "NS_6Bytes8E": 8, "j": 4, "h": 1}


@pytest.fixture(autouse=True)
def few_blocks(monkeypatch):
    """Of 3 instead of up to 16: where there are more chunks than warps (48), a warp takes several chunks."""
    monkeypatch.setattr("sgl_kvpool.transfer.gpu_engine.KERNEL_BLOCKS", 3)


@pytest.fixture
def launched(monkeypatch):
    """Name and result of each kernel that was launched."""
    found, launch = [], ptxrun.Module.launch

    def kept(module, name, *args, **options):
        found.append((name, launch(module, name, *args, **options)))
        return found[-1][1]

    monkeypatch.setattr(ptxrun.Module, "launch", kept)
    return found


def there_and_back(own, other):
    comes_back("staged", own, other, "layer_major", 2)


#: Arrangement and page size of copy runs of one row, which are 1, 3, 5 or 7 words, so that most lanes of a
#: warp are idle; and of 131 rows, which are two or more chunks, the last of them shorter.
RUNS = {"a row": ("token_major", 31), "chunks": ("layer_major", 131)}
#: A warp copies a chunk of this many words at once (`kChunkBytes` of cuda_steps.cuh).
CHUNK_WORDS = 32 * 4


@pytest.mark.usefixtures("stream")
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("engine", ["staged", "kernel"])
@pytest.mark.parametrize(("row_bytes", "word_bytes"), [(16, 16), (24, 8), (20, 4), (7, 1)])
def test_words_of_every_width(row_bytes, word_bytes, engine, run, launched):
    pages, (arrangement, page_size) = 6, RUNS[run]
    run_words = (1 if run == "a row" else page_size) * row_bytes // word_bytes
    assert (run_words > CHUNK_WORDS) == (run == "chunks")
    caches, on_device = device_pool(arrangement, pages, page_size, row_bytes, DEVICE)
    (group,) = caches.groups
    memory = pinned(pages + 2, group.bytes_per_page).fill_(0xEE)
    host = packed_view(memory, group)
    generator = torch.Generator().manual_seed(row_bytes)
    before = []
    for layer in on_device:
        before.append(torch.randint(0, 256, layer.shape, dtype=torch.uint8, generator=generator))
        layer.copy_(before[-1])
    expected = memory.clone().view(pages + 2, LAYERS, page_size, row_bytes)
    given = group.bytes_per_page, memory
    there = GPU_ENGINES[engine](TransferPlan(caches, host, "kv"), tools(*given), True)
    slots, numbers = slots_of([5, 0, 3], page_size, DEVICE), np.array([1, 7, 4])
    there.copy(Transfer(numbers, slots, to_host=True))
    torch.cuda.synchronize()
    for i, layer in enumerate(before):
        expected[numbers, i] = layer[[5, 0, 3]]
    assert torch.equal(memory.view(expected.shape), expected)
    back = GPU_ENGINES[engine](TransferPlan(host, caches, "kv"), tools(*given), False)
    load = Transfer(numbers, slots_of([2, 4, 5], page_size, DEVICE), to_host=False)
    for part in range(LAYERS):
        back.copy(load, part)
    torch.cuda.synchronize()
    for i, layer in enumerate(before):
        layer[[2, 4, 5]] = expected[numbers, i]
    assert all(torch.equal(a, b.cpu()) for a, b in zip(before, on_device, strict=True))
    used = {size for name, _ in launched for word, size in WORDS.items() if f"kernelI{word}E" in name}
    assert used == {word_bytes}


#: Layouts with rows at multiples of a sector; others share the sectors at their ends.
ALIGNED = [name for name in oracle.LAYOUTS if oracle.row_format(name, 512, 64).row_bytes % 32 == 0]


@pytest.mark.usefixtures("stream")
@pytest.mark.parametrize(("own", "other"), [pair for pair in CONVERSIONS if {*pair} <= {*ALIGNED}])
def test_sectors_of_conversions(own, other, launched):
    """Only a latent in bf16 is read and written by halves of sectors: a lane has 32 bytes of it."""
    there_and_back(own, other)
    assert launched
    for _, result in launched:
        lines = result.uncoalesced()
        assert len(lines) == (2 if "bf16" in (own, other) else 0)
        assert all(line["bytes"] == 16 * line["lanes"] for line in lines)


#: Layouts of device and host; a change of the kernels' PTX as of `re.sub`, 0 for all matches; the fault that
#: it causes, or "" for wrong bytes.
WRONG = {
    "a word is left out": ("fp4", "fp4", r"st\.global\.v4\.u32[^;]*;", "", 1, ""),
    # 1 GiB away, where no other tensor of this process is.
    "a word from outside of the pages": (
        "fp4", "fp4", r"(ld\.global\.v4\.u32\s+{[^}]*}, \[%rd\d+)", r"\1+1073741824", 1, "out of all regions"
    ),
    "a store 4 bytes beyond its place": (
        "bf16", "fp4", r"(st\.global\.v2\.u32\s+\[%rd\d+)", r"\1+4", 0, "misaligned"
    ),
    "a maximum of one lane instead of a tile": (
        "bf16", "fp8_block_scale",
        r"shfl\.sync\.bfly\.b32\s+(%r\d+)\|%p\d+, (%r\d+)[^;]*;", r"mov.b32 \1, \2;", 0, "",
    ),
    "subnormal codes that are too large": ("bf16", "fp8_block_scale", "0f46800000", "0f46800001", 0, ""),
}  # fmt: skip


@pytest.mark.usefixtures("stream")
@pytest.mark.parametrize("defect", WRONG)
def test_wrong_kernels_are_noticed(defect, monkeypatch):
    own, other, pattern, replacement, count, fault = WRONG[defect]
    text, found = re.subn(pattern, replacement, runtime.transfer_ptx(), count=count)
    assert found
    module = ptxrun.Module(text)
    monkeypatch.setattr(runtime, "_module", lambda: module)
    with pytest.raises(RuntimeError if fault else AssertionError):
        there_and_back(own, other)
    errors.taken()
    problems = ALLOCATOR.taken_problems()
    assert re.search(fault, problems) if fault else not problems


def made_on_the_cpu(work, fmt, device):
    """`make_problem` on the device, which has no generators when it is emulated."""
    made = make_problem(work, fmt, CpuDevice())
    on_device = {name: value.to(DEVICE) for name, value in vars(made).items() if torch.is_tensor(value)}
    return dataclasses.replace(made, **on_device)


def test_the_decode_step_of_the_benchmark(monkeypatch):
    """Captured once, and replayed as often as it is called."""
    monkeypatch.setattr(transfer_gpu, "make_problem", made_on_the_cpu)
    monkeypatch.setattr(transfer_gpu, "LAYERS", 2)
    monkeypatch.setattr(transfer_gpu, "decode_workload", lambda sm_count: Workload("dense", 16, 1, 128, 128))
    gpu = transfer_gpu.Gpu()
    gpu.decode_step()
    out = gpu._kept.buffers[0]
    first = out.cpu().clone()
    check(gpu._kept.problem, out, 0)
    out.fill_(0)
    gpu.decode_step()
    torch.cuda.synchronize()
    assert torch.equal(out.cpu(), first)
