"""SGLang's DSA backend with our pools and hooks on a GPU: extends read by FlashMLA, decode by our kernels."""

import itertools
from types import SimpleNamespace

import codec_oracle as oracle
import dsa_case
import pytest
from dsa_case import DRAFTS, HEADS, RANK, ROPE, in_forward
from engine_cases import quick
from test_cuda_backend_gpu import publish_alone

pytest.importorskip("sglang")
from test_dsa_backend import EXTENDS, PAIRS, close

pytestmark = pytest.mark.gpu
PREFIXES = {"none": [0, 0, 0], "some": [0, 189, 6]}
LENGTHS = [9, 200, 7]


class Case(dsa_case.Case):
    """On the GPU, with a backend from SGLang's constructor. FlashMLA wants lists of 128 entries or more."""

    device, top_k = "cuda", 128

    def __init__(self, layout, lengths, prefixes):
        prefill, decode = PAIRS[layout]
        self.args = publish_alone(
            dsa_prefill_backend=prefill, dsa_decode_backend=decode, dsa_topk_backend="torch",
            speculative_num_draft_tokens=DRAFTS,
        )  # fmt: skip
        super().__init__(layout, lengths, prefixes, prefill, decode)

    def make_backend(self, prefill, decode):
        from sglang.srt.layers.attention.dsa_backend import DeepseekSparseAttnBackend
        from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

        from sgl_kvpool.sglang_plugin import hook_groups

        hook_groups.apply((hook_groups.SPARSE_ATTENTION,))
        hf_config = SimpleNamespace(architectures=["DeepseekV32ForCausalLM"], index_topk=self.top_k)
        runner = SimpleNamespace(
            device="cuda", page_size=dsa_case.PAGE, is_draft_worker=False, hisparse_coordinator=None,
            token_to_kv_pool=self.pool, req_to_token_pool=ReqToTokenPool(8, 256, "cuda", False),
            kv_cache_dtype=self.pool.dtype, server_args=self.args,
            model_config=SimpleNamespace(
                hf_config=hf_config, context_len=256, num_attention_heads=HEADS, kv_lora_rank=RANK,
                qk_rope_head_dim=ROPE, qk_nope_head_dim=128, v_head_dim=128,
            ),
        )  # fmt: skip
        backend = DeepseekSparseAttnBackend(runner)
        # Lists are positions within requests, and prompts as short as these would be attended densely.
        backend.use_fused_topk = False
        backend._is_in_breakable_cuda_graph = lambda: True
        return backend


def run(layout, mode, lengths, prefixes):
    case = Case(layout, lengths, prefixes)
    with in_forward(case.backend):
        return case, case.run(mode).cpu()


@pytest.mark.parametrize(
    ("prefixes", "mode", "layout"),
    quick(itertools.product(PREFIXES, EXTENDS[:2], PAIRS), [("some", "EXTEND", "fp4")]),
)
def test_extends(prefixes, mode, layout):
    case, found = run(layout, mode, LENGTHS, PREFIXES[prefixes])
    close(found, case.wanted(fresh_as_computed=prefixes == "none" and layout in oracle.PACKED))


@pytest.mark.parametrize(
    ("mode", "layout"),
    quick(
        itertools.product(["DECODE", "TARGET_VERIFY", "DRAFT_EXTEND_V2"], PAIRS),
        [("DECODE", "fp4"), ("TARGET_VERIFY", "fp4")],
    ),
)
def test_decode_and_verify(mode, layout):
    lengths, prefixes = ([9, 200, 7], [8, 199, 6])
    if mode != "DECODE":
        lengths, prefixes = [n + DRAFTS for n in (1, 197, 20)], [1, 197, 20]
    case, found = run(layout, mode, lengths, prefixes)
    close(found, case.wanted())
