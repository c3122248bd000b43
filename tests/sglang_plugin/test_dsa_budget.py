"""Bytes per token of models with sparse attention: SGLang's profiling, hand arithmetic, and real pools.

SGLang resolves the server's arguments for a GPU whose answers the tests set; SGLang's own builder makes the
pools, on the CPU.
"""

from types import SimpleNamespace

import pytest
import torch
from codec_oracle import LAYOUTS, OURS_ALONE
from configurators import classes_of, sizes_of
from pools import DSA_DTYPES as DTYPES
from pools import INDEX_BYTES, dsa_pool, dsa_row_bytes
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool
from test_dcp_pool import as_rank

from sgl_kvpool.attention.decode import workspace_bytes
from sgl_kvpool.layout import MLAKVCacheLayout
from sgl_kvpool.sglang_plugin.hooks import pools
from sgl_kvpool.srt.attention.sparse import sparse_workspace_bytes

LAYERS = 3
#: Implementations that read raw rows; SGLang's own choice on Hopper does not.
ARGV = {"fp8": ("--dsa-prefill-backend", "tilelang", "--dsa-decode-backend", "tilelang")}
#: checkpoint: (latent, rope, number of layers with index keys)
MODELS = {
    "dsa3": (512, 64, 3),
    "dsa3-shared": (512, 64, 2),
    "dsa3-norope": (512, 0, 3),
    "dsa3-rank256": (256, 0, 3),
}
AVAILABLE = 1_000_000_007


@pytest.fixture
def hooked(configured, checkpoints):
    """`hooked(layout, ...)`: SGLang's KVCacheConfigurator of a server, or of its `draft_model`."""

    def build(layout, model="dsa3", *argv, draft_model=None, eagle=0):
        draft = ModelConfig(checkpoints[draft_model]) if draft_model else None
        argv = (*ARGV.get(layout, ()), *argv)
        fields = {"dtype": DTYPES.get(layout), "draft": draft, "eagle": eagle}
        return configured(checkpoints[model], layout, *argv, device="cuda", **fields)

    return build


def pool_of(kvc, tokens):
    """The pool from SGLang's builder for sparse models."""
    sizes = {"max_total_num_tokens": tokens, "max_running_requests": 4}
    return kvc._build_dsa_kv_pool(dsa_pool_class=classes_of(kvc)["dsa"], **sizes)


# -------------------------------------------------------------------- sizes


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_bytes_per_token_are_those_of_the_pool(hooked, layout, model):
    rank, rope, with_index = MODELS[model]
    kvc = hooked(layout, model)
    sizes = sizes_of(kvc)
    token_bytes = LAYERS * dsa_row_bytes(layout, rank, rope) + with_index * INDEX_BYTES
    assert sizes._cell_size == token_bytes
    for page_size in (1, 64):
        wanted = (AVAILABLE - sizes._fixed_overhead_bytes) // token_bytes // page_size * page_size
        assert sizes.calculate_pool_sizes(AVAILABLE, page_size).max_total_num_tokens == wanted

    pool = pool_of(kvc, 256)
    assert pool.kv_cache_layout == layout
    assert pool.get_kv_size_bytes() == (256 + 64) * token_bytes
    assert pool.skip_topk_layers == [False, with_index == 2, False]


def test_sglang_as_it_is_keeps_its_numbers(hooked):
    for model, (rank, rope, with_index) in MODELS.items():
        kvc = hooked(None, model)
        sizes = sizes_of(kvc)
        assert sizes._cell_size == LAYERS * (rank + rope) * 2 + with_index * INDEX_BYTES
        assert sizes._fixed_overhead_bytes == 0
        assert type(pool_of(kvc, 128)) is DSATokenToKVPool


@pytest.mark.parametrize("drafts", [1, 2])
@pytest.mark.parametrize("model", ["dsa3", "dsa3-shared"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_drafts_are_charged_by_their_rows(hooked, layout, model, drafts):
    """A draft's layers have the target's rows, and their own index keys whatever layers the target shares."""
    _, _, with_index = MODELS[model]
    wanted = (LAYERS + drafts) * dsa_row_bytes(layout) + (with_index + drafts) * INDEX_BYTES
    assert sizes_of(hooked(layout, model, eagle=drafts))._cell_size == wanted

    kvc = hooked(layout, model, draft_model=model)
    kvc.layer_info = SimpleNamespace(start_layer=0, end_layer=drafts, num_effective_layers=drafts)
    draft = pool_of(kvc, 256)
    assert draft.kv_cache_layout == layout
    assert draft.get_kv_size_bytes() == (256 + 64) * drafts * (dsa_row_bytes(layout) + INDEX_BYTES)
    assert sizes_of(kvc)._fixed_overhead_bytes == 0  # the target has paid


@pytest.mark.parametrize("model", ["dsa3", "dsa3-shared"])
@pytest.mark.parametrize(("layout", "ranks"), [("fp4", 2), ("bf16", 8), ("fp8_block_scale", 4)])
def test_ranks_that_share_a_prefix_pool(hooked, layout, ranks, model):
    """A token of each rank: a row of the target, the index keys of all ranks, and all of a draft."""
    _, _, with_index = MODELS[model]
    row = dsa_row_bytes(layout)
    target, draft = LAYERS * row + with_index * INDEX_BYTES * ranks, (row + INDEX_BYTES) * ranks
    chunk, drafts = ("--chunked-prefill-size", "4096"), hooked(layout, model, draft_model=model)
    drafted, plain = hooked(layout, model, *chunk, eagle=1), hooked(layout, model, *chunk)
    drafts.layer_info = SimpleNamespace(start_layer=0, end_layer=1, num_effective_layers=1)
    heads = plain.model_config.num_attention_heads
    with as_rank(0, ranks):
        sizes, with_draft = sizes_of(plain), sizes_of(drafted)
        assert (sizes._cell_size, with_draft._cell_size) == (target, target + draft)
        assert pool_of(plain, 256).get_kv_size_bytes() == (256 + 64) * target
        assert pool_of(drafts, 256 * ranks).get_kv_size_bytes() == (256 + 64) * draft
    fmt = MLAKVCacheLayout(layout).pool_row_format(512, 64, is_dsa=True)
    top_k = plain.model_config.hf_config.index_topk
    merged = 4096 * heads * (ranks - 1) * (576 * 2 + 512 * 2 + 512 * 4)
    merged += 4096 * 2 * top_k * 4  # lists of two chunks
    both = [sparse_workspace_bytes(fmt, each, top_k, "cpu") for each in (heads * ranks, heads)]
    assert sizes._fixed_overhead_bytes == merged + both[0]
    gathered = 65536 * 576 * 2  # keys of the draft's prefill
    assert with_draft._fixed_overhead_bytes == merged + sum(both) + gathered


@pytest.mark.parametrize("layout", LAYOUTS)
def test_only_rows_that_sglang_cannot_read_need_memory_to_decode(hooked, layout):
    """Lists of 2048 slots, one per query; any number of queries, because SGLang pads beyond its requests."""
    kvc = hooked(layout)
    found = sizes_of(kvc)._fixed_overhead_bytes
    if layout not in OURS_ALONE:
        assert found == 0
        return
    fmt = MLAKVCacheLayout(layout).pool_row_format(512, 64, is_dsa=True)
    heads, top_k = kvc.model_config.num_attention_heads, kvc.model_config.hf_config.index_topk
    decode = sparse_workspace_bytes(fmt, heads, top_k, "cpu")
    gathered = 65536 * 576 * 2  # keys of a prefill
    assert found == decode + gathered
    for queries in (*range(1, 300), 1000, 4096, 40000):
        assert decode >= workspace_bytes(fmt, heads, queries, top_k)


# -------------------------------------------------------------------- classes


@pytest.mark.parametrize("layout", ["bf16", "fp4"])
def test_a_draft_of_the_other_kind_is_refused(hooked, resolve, checkpoints, layout):
    """A server has one `kv_cache_dtype`; `fp8_block_scale` has different ones in dense and sparse pools.

    Other layouts are refused too.
    """
    dense_draft = hooked(layout, "dsa3", draft_model="mla3")
    with pytest.raises(ValueError, match=r"draft model, has no sparse .* its target has: .*of the target"):
        classes_of(dense_draft)
    sparse_draft = hooked(layout, "dsa3", draft_model="dsa3")
    sparse_draft.server_args = resolve(checkpoints["mla3"], "--kv-cache-layout", layout)
    text = r"^Deepseek\w+, the draft model, has sparse .* its target does not: .*--kv-cache-layout"
    with pytest.raises(ValueError, match=text):
        classes_of(sparse_draft)


def test_a_draft_that_is_no_mla_model_keeps_its_pool(hooked):
    kvc = hooked("fp4", draft_model="mha")
    kvc.use_mla_backend = False
    assert classes_of(kvc)["dsa"] is DSATokenToKVPool


def test_a_pool_of_sglangs_own_is_noticed(hooked):
    """SGLang builds another class than the one it received from our hook."""
    kvc = hooked("bf16")
    with pytest.raises(RuntimeError, match="bf16 was requested, but SGLang built a DSATokenToKVPool"):
        pools._build_token_to_kv_pool(lambda self, **_: dsa_pool("bf16", stock=True), kvc, sizes=None)
    pool = dsa_pool("bf16")
    assert pools._build_token_to_kv_pool(lambda self, **_: pool, kvc, sizes=None) is pool


@pytest.mark.parametrize("scaled", [1.0, 0.5])
def test_a_k_scale_has_no_reader(hooked, scaled):
    kvc = hooked("fp8")
    kvc.model = torch.nn.ModuleList([RadixAttention(2, 576, 1.0, 1, 0, v_head_dim=512)])
    kvc.model[0].k_scale_float = scaled
    if scaled == 1.0:
        assert pool_of(kvc, 128).k_scale(0) == 1.0
        return
    text = r"k_scale=0\.5 in layer 0, and .*dsa does not multiply .*; use --kv-cache-layout bf16"
    with pytest.raises(ValueError, match=text):
        classes_of(kvc)
