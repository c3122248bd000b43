"""The CPU's encoder as a compiled library: built or not, by any number of threads, for any caller."""

import logging
import os
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from codec_oracle import LAYOUTS, assert_same_bytes, hard_rows, row_format
from live_processes import ran

from sgl_kvpool.codec import compiled, encode_rows, prepare, reference

ENCODED = [name for name in LAYOUTS if name != "bf16"]


def by_reference(nope, keys, fmt, k_scale=1.0):
    rows = torch.full((len(nope), fmt.row_bytes), 0xEE, dtype=torch.uint8)
    reference.encode_rows(rows, nope, keys, fmt, k_scale)
    return rows


@pytest.mark.parametrize("count", [1, 2, 3, 8])
@pytest.mark.parametrize("name", ENCODED)
def test_any_number_of_threads_makes_the_same_rows(name, count, threads):
    """211 tokens, which 2, 3 and 8 threads do not divide; of 40 blocks, 32 are encoded together, then 8."""
    fmt = row_format(name, 640, 64)
    nope, keys = hard_rows(211, 640, 5), hard_rows(211, 64, 6)
    expected = by_reference(nope, keys, fmt)
    threads(count)
    assert_same_bytes(encode_rows(nope, keys, fmt), expected)
    one = encode_rows(nope[7:8], keys[7:8], fmt)  # fewer bytes than starting a thread pays for
    assert_same_bytes(one, expected[7:8])


@pytest.mark.parametrize("name", ENCODED)
@pytest.mark.parametrize("tokens", [1, 2, 33])
def test_values_at_any_stride(name, tokens):
    """Latent and rope cut from wider tensors of their own strides and odd offsets, or one token for all."""
    fmt = row_format(name, 256, 64)
    wide, other = hard_rows(tokens, 256 + 48, 1), hard_rows(tokens, 64 + 16, 2)
    for nope, keys in (
        (wide[:, 7:263], other[:, 3:67]),
        (wide[:, :256].contiguous(), other[:, 16:]),
        (wide[:, 48:], other[:, :64].contiguous()),
        (wide[:1, 1:257].expand(tokens, 256), other[:1, 5:69].expand(tokens, 64)),
    ):
        assert_same_bytes(encode_rows(nope, keys, fmt), by_reference(nope, keys, fmt))


def tasks():
    return {int(task) for task in os.listdir("/proc/self/task")}


several_cores = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")


@several_cores
def test_threads_of_a_bound_thread(threads):
    """SGLang's CPU backend binds each of torch's threads, the calling one too; others inherit its core."""
    layout = compiled.row_layout(row_format("fp4", 512, 64))
    first, second, *_ = os.sched_getaffinity(0)

    def counts(binds_each):  # in a thread for which none has worked yet
        os.sched_setaffinity(0, {first, second} if binds_each else {first})
        threads(2)
        before = tasks()
        torch.ones(1 << 20).exp()
        if binds_each:
            [other] = tasks() - before
            os.sched_setaffinity(0, {first})
            os.sched_setaffinity(other, {second})
        return [compiled.module().encoding_threads(layout, 100_000, most) for most in (2, 64)]

    for binds_each, expected in ((True, [2, 1]), (False, [1, 1])):
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(counts, binds_each).result() == expected


@several_cores
def test_torchs_threads_do_the_work(threads):
    """Others would wait for a core: torch's threads spin for milliseconds after each operation."""
    fmt = row_format("fp4", 512, 64)
    nope, keys, ones = hard_rows(4000, 512, 1), hard_rows(4000, 64, 2), torch.ones(1 << 20)

    def started():  # in a thread for which none has worked yet
        threads(3)
        before = tasks()
        encode_rows(nope, keys, fmt)
        found = tasks() - before
        ones.exp()
        return len(found), tasks() - before == found

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(started).result() == (2, True)


def test_a_default_device_changes_nothing():
    # no other test uses this format, so that nothing of it is cached
    fmt = row_format("fp8", 384, 0, align=2)
    values = hard_rows(3, 384)
    with torch.device("meta"):
        rows = compiled.row_layout(fmt)
    assert rows.device.type == "cpu"
    assert_same_bytes(encode_rows(values, None, fmt), by_reference(values, None, fmt))


def test_where_nothing_can_be_compiled_torch_encodes(tmp_path):
    """A process whose PATH has no compiler and whose cache is empty: a line in the log, and the same rows."""
    program = (
        "import logging, torch; logging.basicConfig(level=logging.INFO)\n"
        "from sgl_kvpool import MLAKVCacheLayout; from sgl_kvpool.codec import compiled, encode_rows\n"
        "fmt = MLAKVCacheLayout('fp4').row_format(128, 0)\n"
        "rows = encode_rows(torch.arange(384).view(3, 128).float(), None, fmt)\n"
        "assert compiled.module() is None\n"
        "print(rows.flatten().tolist())"
    )
    environment = {**os.environ, "PATH": str(tmp_path), "TVM_FFI_CACHE_DIR": str(tmp_path / "cache")}
    environment.pop("CXX", None)
    done = ran(sys.executable, "-c", program, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    values = torch.arange(384).view(3, 128).bfloat16()
    expected = by_reference(values, None, row_format("fp4", 128, 0))
    assert done.stdout.strip() == str(expected.flatten().tolist())
    assert "the CPU codec" in done.stderr


def test_a_failure_is_counted_once(monkeypatch, failures):
    def fails(*_, **__):
        raise RuntimeError("ninja exited with status 1")

    compiled.module.cache_clear()
    try:
        with monkeypatch.context() as patch:
            patch.setattr("sgl_kvpool.compiler.Module.load", fails)
            fmt = row_format("fp8", 128, 0)
            for _ in range(2):
                encode_rows(torch.ones(1, 128), None, fmt)
            assert failures() == {"codec_build": 1}
            with pytest.raises(RuntimeError, match="ninja"):
                compiled.module(required=True)
    finally:
        compiled.module.cache_clear()


def test_prepared_before_the_first_row(monkeypatch, caplog):
    """The library is prepared for rows that are encoded on a CPU, and for no others."""
    built = []
    monkeypatch.setattr(compiled, "module", lambda **_: built.append(1))
    with caplog.at_level(logging.INFO):
        prepare(row_format("bf16", 128, 0), "cpu")
        prepare(row_format("fp4", 128, 0), "cuda")
        assert not built
        prepare(row_format("fp4", 128, 0), "cpu")
    assert built == [1]
