"""Bytes of rows and states of hybrid models: SGLang's profiling, hand arithmetic, and the real pools.

SGLang resolves the arguments, those of sparse attention for a GPU whose answers the tests set; SGLang's
configurator and builders size and make states and rows, on the CPU.
"""

import pytest
import torch
from codec_oracle import LAYOUTS
from codec_oracle import row_bytes as row_bytes_of
from configurators import classes_of, sizes_of
from hybrid_configs import LAYERS, MLA_LAYERS
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache import kv_cache_configurator
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool
from sglang.srt.runtime_context import get_schedule

from sgl_kvpool.srt.pool.dsa import LayoutDSATokenToKVPool
from sgl_kvpool.srt.pool.hybrid import LayoutHybridLinearKVPool

#: Bytes of a row with rope, and of a row without.
ROWS = {layout: (row_bytes_of(layout), row_bytes_of(layout, rope=0)) for layout in LAYOUTS}
#: checkpoint: bytes of a request's states in one layer, by hand.
STATES = {
    # q, k and v of 3 heads of 16 at three earlier positions, in bf16; then 3 matrices of 16 x 16 in float32.
    "kda": 3 * 48 * 3 * 2 + 3 * 16 * 16 * 4,
    # 2 matrices of 16 x 16; no convolution.
    "lightning": 2 * 16 * 16 * 4,
    "bailing-kda": 3 * 32 * 3 * 2 + 2 * 16 * 16 * 4,
    "bailing-kda-norope": 3 * 32 * 3 * 2 + 2 * 16 * 16 * 4,
}
GB = 1 << 30
REST_GB = 0.25


@pytest.fixture
def hooked(configured, checkpoints):
    """`hooked(layout, model, ...)`: SGLang's KVCacheConfigurator of a server or of its draft."""

    def build(layout, model="kda", *argv, draft=False, stage=(0, LAYERS), **fields):
        device = "cuda" if model == "glm5" else "cpu"
        # States with an extra buffer need a GPU; without overlap scheduling SGLang keeps them without it.
        without = () if device == "cuda" else ("--disable-overlap-schedule",)
        own = ModelConfig(checkpoints[model], is_draft_model=True) if draft else None
        fields |= {"device": device, "draft": own, "stage": stage}
        return configured(checkpoints[model], layout, *without, *argv, **fields)

    return build


def pools_of(kvc, tokens, requests=2):
    """The pool of requests and their states, and the pool of rows, from SGLang's builders."""
    if get_schedule().max_mamba_cache_size is None:
        kvc._handle_max_mamba_cache(REST_GB)
    classes = {f"{kind}_pool_class": found for kind, found in classes_of(kvc).items()}
    states = kvc._build_hybrid_req_pool(max_num_reqs=requests, extra_max_context_len=0)
    rows = kvc._build_hybrid_linear_kv_pool(max_total_num_tokens=tokens, req_to_token_pool=states, **classes)
    return states, rows


@pytest.mark.parametrize("model", STATES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_and_states_are_what_was_set_aside(hooked, layout, model):
    """To the byte: REST_GB has the states and their padding slot, the workspace, and whole tokens of rows."""
    kvc = hooked(layout, model)
    rest = kvc._handle_max_mamba_cache(REST_GB)
    state_slots = get_schedule().max_mamba_cache_size + 1
    state_bytes = STATES[model] * (LAYERS - len(MLA_LAYERS)) * state_slots
    assert round((REST_GB - rest) * GB) == state_bytes

    sizes = sizes_of(kvc)
    token_bytes = len(MLA_LAYERS) * ROWS[layout][model.endswith("norope")]
    assert sizes._cell_size == token_bytes
    assert sizes._fixed_overhead_bytes == 0  # attention on a CPU has no workspace
    available = int(rest * GB)
    for page_size in (1, 64):
        found = sizes.calculate_pool_sizes(available, page_size).max_total_num_tokens
        assert found == (available - sizes._fixed_overhead_bytes) // token_bytes // page_size * page_size

    states, pool = pools_of(kvc, 256)
    assert isinstance(pool, LayoutHybridLinearKVPool)
    assert pool.kv_cache_layout == layout
    assert list(pool.full_attention_layer_id_mapping) == MLA_LAYERS
    assert pool.get_kv_size_bytes() == (256 + 1) * token_bytes
    cache = states.mamba_pool.mamba_cache
    assert sum(tensor.nbytes for tensor in (*cache.conv, cache.temporal)) == state_bytes
    assert pool.mamba_pool is states.mamba_pool


def test_sglangs_class_is_back_after_a_failure(hooked):
    kvc = hooked("fp4")
    kvc.kv_cache_dtype = torch.float32
    with pytest.raises(ValueError, match="SGLang sees layout"):
        pools_of(kvc, 128)
    assert kv_cache_configurator.HybridLinearKVPool is HybridLinearKVPool


@pytest.mark.parametrize(("stage", "mla_layers"), [((0, 4), [3]), ((4, 6), [5]), ((0, 3), [])])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_stage_has_the_rows_of_its_own_layers(hooked, layout, stage, mla_layers):
    kvc = hooked(layout, stage=stage, pp_size=2)
    assert sizes_of(kvc)._cell_size == len(mla_layers) * ROWS[layout][0]
    _, pool = pools_of(kvc, 128)
    assert pool.get_kv_size_bytes() == 129 * len(mla_layers) * ROWS[layout][0]
    assert list(pool.full_attention_layer_id_mapping) == mla_layers
    for layer_id in mla_layers:
        assert pool.get_row_buffer(layer_id).shape == (129, 1, ROWS[layout][0])


@pytest.mark.parametrize("model", ["lightning", "bailing-kda"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_drafts_are_charged_by_their_rows(hooked, layout, model):
    """The draft of such a model is one MLA layer, for which SGLang builds another hybrid pool."""
    assert sizes_of(hooked(layout, model, eagle=1))._cell_size == 3 * ROWS[layout][0]
    kvc = hooked(layout, model, draft=True, stage=(0, 1))
    _, draft = pools_of(kvc, 256)
    assert isinstance(draft, LayoutHybridLinearKVPool)
    assert draft.kv_cache_layout == layout
    assert draft.get_kv_size_bytes() == 257 * ROWS[layout][0]
    assert draft.get_row_buffer(0).shape == (257, 1, ROWS[layout][0])
    assert sizes_of(kvc)._fixed_overhead_bytes == 0  # the target has paid


def test_scales_of_a_checkpoint_reach_their_layers(hooked):
    """They are collected by model layer."""
    kvc = hooked("fp8")
    layers = (RadixAttention(2, 576, 1.0, 1, layer_id, v_head_dim=512) for layer_id in MLA_LAYERS)
    kvc.model = torch.nn.ModuleList(layers)
    for module, k_scale in zip(kvc.model, (0.5, 0.25), strict=True):
        module.k_scale_float = k_scale
    _, pool = pools_of(kvc, 128)
    assert [pool.k_scale(layer_id) for layer_id in MLA_LAYERS] == [0.5, 0.25]


def test_scales_of_linear_layers_are_no_scales_of_rows(hooked):
    """Lightning layers are modules of the same class; a stage may have only such layers."""
    kvc = hooked("fp8", "lightning", stage=(0, 3), pp_size=2)
    kvc.model = torch.nn.ModuleList([RadixAttention(2, 16, 1.0, 2, layer_id) for layer_id in range(3)])
    for module in kvc.model:
        module.k_scale_float = 0.5
    _, pool = pools_of(kvc, 128)
    assert pool.get_kv_layer_ids() == []


@pytest.mark.parametrize("layout", ["bf16", "fp8", "fp4"])
def test_a_sparse_hybrid(hooked, layout):
    """GLM5-Next: rows by their layout, index keys as SGLang counts them."""
    tilelang = ("--dsa-prefill-backend", "tilelang", "--dsa-decode-backend", "tilelang")
    readers = () if layout == "fp4" else tilelang
    stock, ours = sizes_of(hooked(None, "glm5", *tilelang)), sizes_of(hooked(layout, "glm5", *readers))
    assert ours._cell_size - stock._cell_size == 2 * (ROWS[layout][1] - 1024)
    assert (ours._fixed_overhead_bytes > 0) == (layout == "fp4")  # the workspaces of our reader
    _, pool = pools_of(hooked(layout, "glm5", *readers), 512)
    assert isinstance(pool, LayoutHybridLinearKVPool)
    assert isinstance(pool.full_kv_pool, LayoutDSATokenToKVPool)
    assert (pool.kv_cache_layout, pool.index_kpool) == (layout, 4)
    assert pool.get_row_buffer(5).shape == (512 + 256, 1, ROWS[layout][1])
