"""Attention on CPUs in C++: every version of its instructions, any shape, threads, sanitizers."""

import os
import shutil
import subprocess
from pathlib import Path
from unittest import mock

import codec_oracle as oracle
import pytest
import torch
from decode_cases import check, expected, make_case
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sgl_kvpool import codec
from sgl_kvpool.attention import cpu
from sgl_kvpool.attention.decode import mla_decode
from sgl_kvpool.compiler import cpu_flags

HERE = Path(__file__).parent
ARRANGEMENTS = ["layer_major", "token_major", "page_major"]
NEEDED = {"DEFAULT": [], "AVX2": ["avx2"], "AVX512": ["avx512_bw"], "AVX512_BF16": ["avx512_bf16"]}
HAS = torch.cpu.get_capabilities()
VERSIONS = [name for name, parts in NEEDED.items() if all(HAS.get(part) for part in parts)]


@pytest.fixture(params=VERSIONS)
def version(request, monkeypatch):
    """The library for some instructions of this CPU, whichever torch would choose."""
    cpu.module.cache_clear()
    monkeypatch.setattr(cpu, "capability", lambda: request.param)
    yield request.param
    cpu.module.cache_clear()


def attended(case):
    positional, keywords = case.arguments
    return mla_decode(*positional, **keywords)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("layout", oracle.LAYOUTS)
def test_every_version(version, layout, dtype):
    """Rows of NaN outside of the lists; five heads are a register tile and one more."""
    assert cpu.module(required=True) is not None
    for k_scale, rope in ((1.0, 64), (0.5, 0)):
        shape = {"rank": 384, "rope": rope, "heads": 5, "counts": ((70, 71), (131, 0))}
        case = make_case(layout, **shape, dtype=dtype, k_scale=k_scale)
        check(attended(case), case, rounding=0)


# The fixture sets the number of threads for all examples.
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_shape(data, threads):
    queries = data.draw(st.integers(1, 3), label="queries")
    group = st.tuples(*[st.integers(-1, 150)] * queries)
    counts = data.draw(st.lists(group, min_size=1, max_size=4), label="counts")
    case = make_case(
        data.draw(st.sampled_from(oracle.LAYOUTS), label="layout"),
        rank=data.draw(st.sampled_from([128, 256, 640]), label="rank"),
        rope=data.draw(st.sampled_from([0, 64]), label="rope"),
        heads=data.draw(st.sampled_from([1, 2, 3, 4, 6, 33, 70]), label="heads"),
        counts=tuple(counts),
        arrangement=data.draw(st.sampled_from(ARRANGEMENTS), label="arrangement"),
        ids=data.draw(st.sampled_from([torch.int32, torch.int64]), label="ids"),
        dtype=data.draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32]), label="dtype"),
        seed=data.draw(st.integers(0, 99), label="seed"),
    )  # fmt: skip
    threads(data.draw(st.integers(1, 3), label="threads"))
    check(attended(case), case, rounding=0)
    with mock.patch.object(cpu, "module", return_value=None):  # torch, where nothing compiles
        check(attended(case), case, rounding=0)


def error(case, found):
    """Root mean square of the errors of results."""
    return float(((found[0].double().numpy() - expected(case)[0]) ** 2).mean() ** 0.5)


@pytest.mark.parametrize("layout", oracle.LAYOUTS)
def test_as_exact_as_torch(layout, monkeypatch):
    """Float32 queries, whose results are not rounded, over 3000 rows.

    The order of MKL's sums depends on the CPU: on one of model 207 torch is off by 0.7 of what we are.
    """
    case = make_case(layout, heads=4, counts=((3000,),), width=3000, dtype=torch.float32)
    found = error(case, attended(case))
    monkeypatch.setattr(cpu, "module", lambda: None)
    assert found < 2 * error(case, attended(case))


@pytest.mark.parametrize("scale", [-0.06, 0.0])
def test_scales_that_are_not_positive(scale):
    """Entries that a query does not attend stay out whatever the sign of -inf times the scale."""
    case = make_case("fp8", rank=128, heads=3, counts=((40, 7),)).but(scale=scale)
    check(attended(case), case, rounding=0)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_threads_split_long_and_short_lists(count, threads):
    case = make_case("fp4", rank=128, heads=16, counts=((2900,), (3,), (700,), (0,)), width=2900)
    threads(count)
    check(attended(case), case, rounding=0)


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_sanitizers(sanitizer, tmp_path):
    """A program that drives the kernels with odd sizes, unaligned rows and threads."""
    compiler = shutil.which(os.environ.get("CXX") or "c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    command = [compiler, f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all", "-pthread"]
    (tmp_path / "empty.cpp").write_text("int main() {}")
    built = subprocess.run([*command, tmp_path / "empty.cpp", "-o", tmp_path / "empty"], capture_output=True)
    if built.returncode or subprocess.run([tmp_path / "empty"], capture_output=True).returncode:
        pytest.skip(f"no runtime of -fsanitize={sanitizer}")
    flags = [flag for flag in cpu_flags(cpu.capability(), exact=False) if flag != "-O3"]
    sources = Path(cpu.__file__).parent / "csrc"
    program = tmp_path / "driver"
    command += [*flags, "-O1", "-g", f"-I{sources}", HERE / "attend_driver.cpp"]
    subprocess.run([*command, "-o", program], check=True)
    done = subprocess.run([program], capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout) == (0, "same results\n"), done.stderr[-3000:]


def test_a_failure_is_counted_once_and_torch_attends(monkeypatch, failures):
    def fails(*_, **__):
        raise RuntimeError("ninja exited with status 1")

    codec.compiled.module()  # compiled before, so that it does not fail too
    cpu.module.cache_clear()
    try:
        with monkeypatch.context() as patch:
            patch.setattr("sgl_kvpool.compiler.Module.load", fails)
            case = make_case("bf16", rank=128, heads=2)
            for _ in range(2):
                check(attended(case), case, rounding=0)
            assert failures() == {"attention_build": 1}
            with pytest.raises(RuntimeError, match="ninja"):
                cpu.module(required=True)
    finally:
        cpu.module.cache_clear()
