"""`bench rates` without a GPU: its kernels compile, and measure the instructions that they name.

tests/ptxrun/test_ptx_rates.py executes them.
"""

import re
import subprocess
import sysconfig
from collections import Counter
from pathlib import Path

import pytest

from scripts.bench.rates import library, measure

NVDISASM = Path(sysconfig.get_paths()["purelib"]) / "triton" / "backends" / "nvidia" / "bin" / "nvdisasm"
MUL = r"H(MUL2|FMA2)(\.MMA)?(\.BF16_V2)?"
LOP3, SHIFT, CVT = r"LOP3\.LUT", r"SHF.*|IMAD\.SHL.*|LEA.*", r"F2FP\.F16\.E4M3\.UNPACK_B"
#: Expected share of a loop's instructions for each kernel of `OPERATIONS`, in its order. Decoding 8 FP4
#: values takes 8 LOP3, 7 shifts and 4 products, or by way of e4m3 4 LOP3, 3 shifts, 4 conversions and 4
#: products.
SHARES = [
    {LOP3: 1},
    {r"SHF\.R\.W.*": 1},
    {r"IMAD(\.U32)?": 1},
    {"PRMT": 1},
    {MUL: 1},
    {MUL: 1},
    {CVT: 1},
    {LOP3: 1 / 2, "IMAD": 1 / 2},
    {LOP3: 1 / 2, MUL: 1 / 2},
    {LOP3: 1 / 2, CVT: 1 / 2},
    {LOP3: 8 / 19, SHIFT: 7 / 19, MUL: 4 / 19},
    {LOP3: 4 / 15, SHIFT: 3 / 15, CVT: 4 / 15, MUL: 4 / 15},
    {LOP3: 4 / 9, SHIFT: 3 / 9, MUL: 2 / 9},
    {CVT: 1 / 2, MUL: 1 / 2},
]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """What ptxas says, and the machine code of each kernel."""
    try:
        nvcc = library.find_nvcc()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    if not NVDISASM.exists():
        pytest.skip("triton brings no nvdisasm on this platform")
    cubin = tmp_path_factory.mktemp("rates") / "rates.cubin"
    command = [nvcc, *library._FLAGS, "-Xptxas=-v", "-cubin", library.SOURCE, "-o", cubin]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    code = subprocess.check_output([NVDISASM, "-c", cubin], text=True)
    return done.stderr, dict(re.findall(r"\.text\.(\w+):\n(.*?)(?=\.text\.\w+:|\Z)", code, flags=re.S))


def loop(code):
    """Count of each instruction in the longest loop."""
    lines, labels, longest = code.splitlines(), {}, []
    for number, line in enumerate(lines):
        if label := re.match(r"\s*\.(L_x_\d+):", line):
            labels[label[1]] = number
        back = re.search(r"\bBRA.*`\(\.(L_x_\d+)\)", line)
        if back and back[1] in labels:
            body = [
                re.search(r"\*/\s+(?:@!?U?P\d+\s+)?([A-Z0-9_.]+)", one)
                for one in lines[labels[back[1]] : number + 1]
            ]
            names = [found[1] for found in body if found]
            longest = max(longest, names, key=len)
    return Counter(longest)


def kernels(codes, pattern):
    return {name: code for name, code in codes.items() if re.search(pattern, name)}


def test_nothing_is_spilled_or_serialised(compiled):
    output, codes = compiled
    assert "warning" not in output
    assert "erializ" not in output  # ptxas reports wgmma instructions that it serialises
    frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", output)
    gathers = len(measure.ROW_BYTES) * len(measure.HOWS)
    assert len(codes) == len(frames) == len(library.OPERATIONS) + 3 * 3 * 2 + gathers
    assert set(frames) == {("0", "0", "0")}


@pytest.mark.parametrize("op", range(len(library.OPERATIONS)))
def test_each_loop_consists_of_its_operations_instructions(compiled, op):
    (code,) = kernels(compiled[1], rf"instructionsILi{op}E").values()
    found = loop(code)
    total = found.total()
    assert total >= 64  # otherwise the loop's own instructions would shift the shares
    for pattern, share in SHARES[op].items():
        count = sum(number for name, number in found.items() if re.fullmatch(pattern, name))
        assert count / total == pytest.approx(share, rel=0.15), (library.OPERATIONS[op], pattern, found)


def test_products_and_gathers(compiled):
    for name, code in kernels(compiled[1], "products").items():
        found = loop(code)
        assert found["HGMMA.64"] % 16 == 0, name
        # Descriptors move to uniform registers; the fewer other instructions the better.
        assert found.total() < 5.5 * found["HGMMA.64"], (name, found)
    for how, instruction in (("0", r"UBLKCP"), ("1", r"LDGSTS\.E\.BYPASS\.128"), ("2", r"LDG\.E\.128")):
        found = kernels(compiled[1], rf"gatherILi\d+ELi{how}E")
        assert len(found) == len(measure.ROW_BYTES)
        assert all(re.search(rf"\b{instruction}", code) for code in found.values()), how


def test_the_library_is_built_and_loaded(tmp_path):
    """Linked with a CUDA runtime; without a driver its calls say so."""
    import torch

    try:
        built = library.compile_library(tmp_path)
    except FileNotFoundError as error:
        pytest.skip(str(error))
    found = library.Library(built)
    assert b"driver" in found._library.kvpool_error(35)
    if not torch.cuda.is_available():
        error = found._library.kvpool_gather(416, 0, None, None, 0, None, 1, None)
        assert error != 0
    # A size without a kernel is an error of its own: cudaErrorInvalidValue.
    assert found._library.kvpool_gather(400, 0, None, None, 0, None, 1, None) == 1


def test_jobs():
    found = measure.jobs()
    assert len({str(job) for job in found}) == len(found)
    assert found[0] == {"what": "peaks"}
    for job in found:
        if job["what"] == "gather":
            assert job["per_sm"] * measure._shared_bytes(job["row_bytes"], job["how"]) <= 227 << 10
    gathers = {(j["row_bytes"], j["how"], j["order"]) for j in found if j["what"] == "gather"}
    assert len(gathers) == len(measure.ROW_BYTES) * len(measure.HOWS) * len(measure.ORDERS)


def test_no_compiler(monkeypatch, tmp_path):
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(library.sysconfig, "get_paths", lambda: {"purelib": str(tmp_path)})
    monkeypatch.setattr(library, "_USUAL", tmp_path / "absent")
    with pytest.raises(FileNotFoundError, match="set CUDA_HOME to its folder"):
        library.find_nvcc()
    (tmp_path / "bin").mkdir()
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.write_text("#!/bin/sh\necho no such option >&2\nexit 2\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert library.find_nvcc() == str(nvcc)
    with pytest.raises(RuntimeError, match="nvcc failed: no such option"):
        library.compile_library(tmp_path)
