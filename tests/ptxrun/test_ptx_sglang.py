"""SGLang's attention backends, real pools and batches: what a decode step launches, on ptxrun."""

import pytest
import test_backend
import test_cuda_backend
import torch
from codec_oracle import NARROW, OURS_ALONE
from dsa_case import Case as SparseCase
from dsa_case import in_forward
from test_cuda_backend import CudaCase
from test_dsa_backend import PAIRS, hooked  # noqa: F401, a fixture

from sgl_kvpool import env
from sgl_kvpool.attention.decode_config import decode_config, decode_kernel_of

pytestmark = pytest.mark.usefixtures("published")

LAYOUTS = NARROW


def close(found, wanted):
    """Queries, keys and weights are rounded to bfloat16."""
    torch.testing.assert_close(found.double(), torch.as_tensor(wanted).double(), rtol=0.03, atol=0.02)


def decode_kernels(runs):
    return {name for name, _ in runs.launched if name.endswith("decode_kernel")}


@pytest.fixture
def of_deepseek(monkeypatch):
    """Rows of DeepSeek's size, which the Gluon kernel is written for, instead of those of the usual tests."""
    for module in (test_backend, test_cuda_backend):
        monkeypatch.setattr(module, "RANK", 512)


@pytest.mark.parametrize("mode", ["DECODE", "TARGET_VERIFY"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_kvpool_mla(on_ptxrun, of_deepseek, monkeypatch, caplog, layout, mode):
    """A decode, and a verification of four drafts, over SGLang's request table."""
    caplog.set_level("INFO")
    prefixes = [0, 39, 64] if mode == "DECODE" else [0, 36, 61]
    case = CudaCase(layout, [1, 40, 65] if mode == "DECODE" else [4, 40, 65], prefixes, monkeypatch)
    assert f"kvpool_mla decodes {layout} with the gluon kernel" in caplog.text
    on_ptxrun.launched.clear()
    close(case.run(mode), case.wanted(fresh_as_computed=False))
    assert decode_kernels(on_ptxrun) == {"gluon_decode_kernel"}


@pytest.fixture
def wants_triton(monkeypatch):
    """Sets the variable to Triton's kernel, in a process that may have chosen the other one before."""
    monkeypatch.setenv(env.DECODE_KERNEL, "triton")
    choices = decode_kernel_of, decode_config
    for choice in choices:
        choice.cache_clear()
    yield
    for choice in choices:
        choice.cache_clear()


def test_kvpool_mla_with_tritons_kernel(on_ptxrun, of_deepseek, wants_triton, monkeypatch):
    case = CudaCase("fp4", [1, 40, 65], [0, 39, 64], monkeypatch)
    close(case.run("DECODE"), case.wanted(fresh_as_computed=False))
    assert decode_kernels(on_ptxrun) == {"decode_kernel"}


@pytest.mark.usefixtures("hooked")
@pytest.mark.parametrize("layout", OURS_ALONE)
def test_sparse_attention(on_ptxrun, layout):
    """SGLang's DSA backend with our decode: rows of a top-k list."""
    case = SparseCase(layout, [1, 40, 7], [0, 39, 6], *PAIRS[layout])
    on_ptxrun.launched.clear()
    with in_forward(case.backend):
        close(case.run("DECODE"), case.wanted())
    assert decode_kernels(on_ptxrun) == {"gluon_decode_kernel"}
