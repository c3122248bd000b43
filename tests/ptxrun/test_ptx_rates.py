"""The kernels of `bench rates` on ptxrun: products and gathers are right, every kind of measurement runs."""

import re

import numpy as np
import ptxrun
import ptxrun_builds
import pytest
import torch

from scripts.bench.attention.device import CpuDevice
from scripts.bench.rates import measure
from scripts.bench.rates.library import FACTOR, OPERATIONS, SELECTOR, SOURCE

K, BLOCKS = 256, 2


@pytest.fixture(scope="module")
def library():
    return Emulated(ptxrun.Module(ptxrun_builds.nvcc_ptx(SOURCE.read_text(), ("-O3",))))


class Emulated:
    """`Library` on ptxrun; `options` are those of a launch."""

    def __init__(self, module):
        assert module.unsupported == []
        self.module, self.options = module, {}

    def instructions(self, op, out, clocks, rounds, blocks, threads):
        self._launch(rf"instructionsILi{op}E", blocks, threads, [FACTOR, SELECTOR, out, clocks, rounds])

    def products(self, n, kind, sums, operands, out, clocks, rounds, blocks, groups):
        name, arguments = rf"productsILi{n}ELi{kind}ELi{sums}E", [operands, out, clocks, rounds]
        self._launch(name, blocks, 128 * groups, arguments, shared=4 * 64 * K * 2, readonly=[operands])

    def gather(self, row_bytes, how, pool, ids, rows, out, blocks):
        shared = measure._shared_bytes(row_bytes, how)
        arguments = [pool, ids, rows, out]
        self._launch(rf"gatherILi{row_bytes}ELi{how}E", blocks, 32, arguments, shared, readonly=[pool, ids])

    def _launch(self, name, blocks, threads, arguments, shared=0, readonly=()):
        (kernel,) = (one for one in self.module.kernels if re.search(name, one))
        options = {"dynamic_shared_bytes": shared, "readonly": readonly, **self.options}
        self.module.launch(kernel, blocks, threads, arguments, **options)


class Device(CpuDevice):
    def __init__(self):
        super().__init__(rounds=1)
        self.sm_count = BLOCKS


def swizzled(tile):
    """[rows, 64] as stored -> in logical order: 16-byte chunk p of row r is stored at p xor (r mod 8)."""
    rows, chunks = torch.arange(len(tile))[:, None], torch.arange(8)[None]
    return tile.view(-1, 8, 8)[rows, chunks ^ rows % 8].reshape(len(tile), 64)


def first_operand(data, group, groups, kind):
    """A [64, K] of a warp group, from what is in registers or shared memory."""
    tiles = data.view(groups + 1, 4, 64, 64)[group]
    if measure.KINDS[kind] == "A in shared memory":
        return torch.cat([swizzled(tile) for tile in tiles], 1)
    if measure.KINDS[kind] == "A in shared memory, transposed":
        return torch.cat([swizzled(tile) for tile in tiles]).T
    registers = data[: groups * 128 * 8].view(groups, 4, 32, 4, 2)[group]  # warp, lane, register, half
    found = data.new_zeros(64, 16)
    for warp, lane, register in np.ndindex(4, 32, 4):
        row = 16 * warp + lane // 4 + 8 * (register % 2)
        column = lane % 4 * 2 + 8 * (register // 2)
        found[row, column : column + 2] = registers[warp, lane, register]
    return found.repeat(1, K // 16)


def accumulators(n):
    """Row and column of each accumulator of a warp group's threads, [128 * n / 2] each."""
    thread, number = np.divmod(np.arange(128 * n // 2), n // 2)
    warp, lane = np.divmod(thread, 32)
    rows = 16 * warp + lane // 4 + 8 * (number // 2 % 2)
    return rows, number // 4 * 8 + lane % 4 * 2 + number % 2


CASES = [
    (n, kind, sums, groups) for n in (8, 16, 32) for kind in range(3) for sums in (1, 2) for groups in (1, 2)
]
QUICK = [(16, 0, 1, 1), (8, 1, 2, 2)]


@pytest.mark.parametrize(
    ("n", "kind", "sums", "groups"),
    [pytest.param(*case, marks=[pytest.mark.quick] * (case in QUICK)) for case in CASES],
)
def test_products_are_those_of_the_operands(library, n, kind, sums, groups):
    data = torch.randn((groups + 1) * 64 * K).bfloat16()
    out = torch.full((BLOCKS, groups, 128 * n // 2), float("nan"))
    library.options = {"seed": n + kind}
    library.products(n, kind, sums, data, out, torch.zeros(BLOCKS, dtype=torch.int64), 2, BLOCKS, groups)
    other = torch.cat([swizzled(tile) for tile in data.view(groups + 1, 4, 64, 64)[groups]], 1)[:n].double()
    assert torch.equal(out[0], out[1])
    rows, columns = accumulators(n)
    for group in range(groups):
        expected = 2 * (first_operand(data, group, groups, kind).double() @ other.T)  # two rounds
        torch.testing.assert_close(out[0, group].double(), expected[rows, columns], rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("how", range(len(measure.HOWS)))
@pytest.mark.parametrize("row_bytes", [pytest.param(416, marks=pytest.mark.quick), *measure.ROW_BYTES[1:]])
def test_gathers_read_the_rows_of_the_list(library, row_bytes, how):
    pool = torch.randint(0, 256, (300, row_bytes), dtype=torch.uint8)
    count = 32 * BLOCKS * 6
    ids = torch.randint(0, 300, (count + 5,), dtype=torch.int32)  # the last rows do not fill a stage
    out = torch.full((BLOCKS, 32), -1, dtype=torch.int32)
    library.options = {"seed": row_bytes}
    library.gather(row_bytes, how, pool, ids, len(ids), out, BLOCKS)
    words = pool.view(torch.int32)[ids[:count].long()].numpy().reshape(BLOCKS, 6, 32, -1)
    if measure.HOWS[how] == "loads of 16 bytes":
        assert np.bitwise_xor.reduce(out.numpy(), None) == np.bitwise_xor.reduce(words, None)
    else:
        np.testing.assert_array_equal(out.numpy(), np.bitwise_xor.reduce(words[..., -1], 1))


#: Values of jobs that are run here: others take long and do not change the way to measure.
USUAL = {"n": (16,), "kind": (1,), "sums": (2,), "row_bytes": (656,), "order": (1, 2), "per_sm": (1, 8)}


def jobs():
    """Jobs with the values of `USUAL`."""
    return [job for job in measure.jobs() if all(job.get(n, some[0]) in some for n, some in USUAL.items())]


def test_every_kind_of_measurement_can_be_made(library):
    """On a device of two SMs, whose clocks mean nothing."""
    library.options = {}
    measurer = measure.Measurer(library, Device(), rounds=4, threads=64, pool_bytes=1 << 17)
    found = {str(job): measurer.measure(job) for job in jobs()}
    assert len(found) == 1 + len(OPERATIONS) + 1 + 2 + 2 * len(measure.HOWS)
    rates = [v for row in found.values() for name, v in row.items() if "clock" in name]
    assert len(rates) == len(OPERATIONS) + 2
    assert min(rates) > 0
    assert sum("gb_per_s" in row for row in found.values()) == 2 * len(measure.HOWS)
    (subnormals,) = (row for job, row in found.items() if "subnormals" in job)
    # ptxrun's products are exact.
    assert [v for v in subnormals.values() if isinstance(v, bool)] == [True, True]


def test_subnormals_that_are_flushed_are_noticed(library, monkeypatch):
    products = library.products

    def flushing(n, kind, sums, operands, *rest):
        products(n, kind, sums, torch.where(operands.float().abs() < 2.0**-126, 0, operands), *rest)

    monkeypatch.setattr(library, "products", flushing)
    found = measure.Measurer(library, Device()).measure({"what": "subnormals"})
    assert [v for v in found.values() if isinstance(v, bool)] == [False, False]
