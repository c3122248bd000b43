"""Bytes per token as SGLang's memory profiling counts them, against hand arithmetic."""

from types import SimpleNamespace

import pytest
import torch
from codec_oracle import ROW_BYTES
from configurators import classes_of, sizes_of
from hybrid_configs import MLA_LAYERS
from refused import TIER
from sglang.srt import runtime_context
from sglang.srt.arg_groups.overrides import model_config_of
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MambaPool
from sglang.srt.mem_cache.prefill_budget import PrefillBudget
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from test_dcp_pool import as_rank

from sgl_kvpool.attention.decode import workspace_bytes
from sgl_kvpool.layout import MLAKVCacheLayout
from sgl_kvpool.sglang_plugin.hooks import budget
from sgl_kvpool.sglang_plugin.pool_request import PoolRequest
from sgl_kvpool.srt.host.states import StateView
from sgl_kvpool.srt.pool.k_scales import checked_k_scales
from sgl_kvpool.transfer import gpu_engine

LAYERS = 3


@pytest.fixture
def configurator(configured, checkpoints):
    """`configurator(layout, ...)`: SGLang's DefaultPoolConfigurator for a resolved server, with our hooks."""

    def build(layout, *, backend=None, model="mla3", draft=False, eagle=0):
        named = ["--attention-backend", backend] if backend else []
        own = ModelConfig(checkpoints[model]) if draft else None
        return sizes_of(configured(checkpoints[model], layout, *named, draft=own, eagle=eagle))

    return build


@pytest.mark.parametrize(
    ("layout", "server", "token_bytes"),
    [
        *((layout, {}, LAYERS * row_bytes) for layout, row_bytes in ROW_BYTES.items()),
        ("fp4", {"model": "norope"}, LAYERS * 288),
        ("fp4", {"model": "rank256"}, LAYERS * 272),
        ("auto", {}, LAYERS * 1152),
        ("bf16", {"backend": "torch_native"}, LAYERS * 1152),
        ("fp8", {"backend": "torch_native"}, LAYERS * 576),
        ("fp4", {"draft": True}, LAYERS * 416),
        ("bf16", {"backend": "torch_native", "eagle": 1}, (LAYERS + 1) * 1152),
    ],
)
@pytest.mark.parametrize("page_size", [1, 64])
def test_tokens_agree_with_hand_arithmetic(configurator, layout, server, token_bytes, page_size):
    available = 1_000_000_007
    wanted = available // token_bytes // page_size * page_size
    sizes = configurator(layout, **server).calculate_pool_sizes(available, page_size)
    assert sizes.max_total_num_tokens == wanted


@pytest.mark.parametrize(("ranks", "layout"), [(2, "fp4"), (8, "bf16"), (3, "fp8")])
def test_a_draft_has_the_rows_of_all_ranks(configured, checkpoints, ranks, layout):
    """The pools that SGLang's builder makes with our class have the bytes that are charged."""
    model, sizes, pools = checkpoints["mla3"], {}, {}
    for name, own in (("target", None), ("draft", ModelConfig(checkpoints["mla"]))):
        with_draft = {"eagle": 1} if own is None else {"stage": (0, 1)}
        kvc = configured(model, layout, draft=own, **with_draft)
        with as_rank(1, ranks):
            sizes[name] = sizes_of(kvc)._cell_size
            tokens, mla = 256 * kvc.loc_space_scale, classes_of(kvc)["mla"]
            pools[name] = kvc._build_mla_kv_pool(max_total_num_tokens=tokens, mla_pool_class=mla)
            assert pools[name].dcp_size == (ranks if own is None else 1)
    rows = 256 + pools["target"].page_size
    assert sum(pool.get_kv_size_bytes() for pool in pools.values()) == rows * sizes["target"]
    assert sizes["target"] == (LAYERS + ranks) * ROW_BYTES[layout]


def test_keys_of_a_drafts_heads_are_not_spread(configured, checkpoints):
    """SGLang's pool of an EAGLE3 draft without MLA: all slots and heads on each rank, written as they are."""
    own = ModelConfig(checkpoints["mha"], is_draft_model=True)
    kvc = configured(checkpoints["mla3"], "fp4", draft=own, stage=(0, 1), use_mla_backend=False)
    with as_rank(1, 2):
        pool = kvc._build_mha_kv_pool(
            max_total_num_tokens=256 * kvc.loc_space_scale, mha_pool_class=classes_of(kvc)["mha"],
            quant_method=None,
        )  # fmt: skip
        heads, width = own.num_key_value_heads, own.head_dim
        assert pool.k_buffer[0].shape == (512 + pool.page_size, heads, width)
        slots, keys = torch.tensor([200, 511, 7]), torch.randn(3, heads, width).bfloat16()
        found = torch.randn(3, heads, own.v_head_dim).bfloat16()
        pool.set_kv_buffer(SimpleNamespace(layer_id=0), slots, keys, found)
    assert torch.equal(pool.k_buffer[0][slots], keys)
    assert int(pool.k_buffer[0].flatten(1).any(1).sum()) == 3


@pytest.mark.parametrize(
    ("page_size", "tokens", "context", "shortest"),
    [
        (64, 1024, 4096, 960),  # SGLang accepts prompts of 1017
        (64, 4153, 4096, 4089),
        (64, 4154, 4096, None),  # and here of 4089
        (1, 1024, 4096, None),
        (7, 700, 4096, 693),
    ],
)
def test_prompts_that_sglang_accepts_and_never_schedules(monkeypatch, page_size, tokens, context, shortest):
    """With the bounds of `TpModelWorker` and `validate_input_length`, and those of `PrefillBudget`."""
    from sgl_kvpool.sglang_plugin.hooks import pools

    said = []
    monkeypatch.setattr(pools.logger, "warning", lambda text, *values: said.append((text % values).split()))
    pool = SimpleNamespace(size=tokens, page_size=page_size, dcp_size=1)
    pools._warn_of_prompts_that_wait(pool, context)
    allocator = SimpleNamespace(page_size=page_size, available_size=lambda: tokens)
    tree = SimpleNamespace(supports_mamba=lambda: False, evictable_size=lambda: 0)
    others = {"max_new_tokens": 0, "input_tokens": 0, "swa_host_hit_length": 0, "chunk_limit": None}

    def waits(prompt):
        sizes = {"extend_input_len": prompt, "total_tokens": prompt + page_size}
        return not PrefillBudget(allocator, tree).check_prefill(**sizes, **others)[0]

    first = [prompt for prompt in range(1, min(context, tokens) - 1 - 5) if waits(prompt)][:1]
    assert first == ([] if shortest is None else [shortest])
    assert [(words[4], words[-1]) for words in said] == [(str(prompt), str(prompt)) for prompt in first]


def test_modules_that_disagree_on_a_k_scale_and_a_layout_without_one():
    model = torch.nn.ModuleList(RadixAttention(2, 576, 1.0, 1, 2, v_head_dim=512) for _ in range(2))
    model[0].k_scale_float, model[1].k_scale_float = 2.0, 4.0
    with pytest.raises(ValueError, match=r"layer 2 have k_scale 2\.0 and 4\.0"):
        checked_k_scales(model, MLAKVCacheLayout("fp8"), ())
    assert checked_k_scales(model, MLAKVCacheLayout("bf16"), ("flashmla",)) == {}


@pytest.fixture
def on_a_gpu(configured, checkpoints):
    """`on_a_gpu(model, layout, ...)`: the request of SGLang's KVCacheConfigurator of a server on Hopper."""

    def build(model, layout, *argv, **fields):
        return PoolRequest(configured(checkpoints[model], layout, *argv, **{"device": "cuda", **fields}))

    return build


@pytest.mark.parametrize(
    ("layout", "arguments", "row_bytes"),
    [
        ("fp4", [TIER], 416),
        ("bf16", [TIER, "--kv-host-layout", "fp4"], 416),
        ("bf16", [TIER, "--kv-cache-arrangement", "token_major"], 1152),
        ("bf16", [TIER], None),  # SGLang's own host pool
        ("fp4", [], None),
    ],
)
def test_page_buffers_on_a_gpu_are_charged(on_a_gpu, resolve, checkpoints, layout, arguments, row_bytes):
    """Eight slots of 16 pages of three layers."""
    expected = 0 if row_bytes is None else 8 * 16 * LAYERS * 64 * row_bytes
    for fields, bytes_of_all in (
        ({"device": "cpu"}, 0), ({}, expected), ({"eagle": 1}, expected * (LAYERS + 1) // LAYERS)
    ):  # fmt: skip
        request = on_a_gpu("mla3", layout, *arguments, **fields)
        assert budget.page_buffer_bytes(request) == bytes_of_all
    # An unpacked draft of three layers has its own tier: ours for MLA rows, SGLang's for other models.
    for draft, tiers in (("mla3", 2), ("mha", 1)):
        kvc = (request := on_a_gpu("mla3", layout, *arguments, eagle=1)).configurator
        kvc.spec_algorithm = SpeculativeAlgorithm.EAGLE3
        kvc.spec_aux_config.draft_model_config = model_config_of(resolve(checkpoints[draft]))
        assert budget.page_buffer_bytes(request) == tiers * expected


@pytest.mark.parametrize("stage", [(0, 6), (2, 5)])
@pytest.mark.parametrize(
    ("model", "part_bytes"),
    [
        # By hand: positions of q, k and v in bf16 and matrices in float32; lightning has no convolution.
        ("kda", (3 * 48 * 3 * 2, 3 * 16 * 16 * 4)),
        ("bailing-kda", (3 * 32 * 3 * 2, 2 * 16 * 16 * 4)),
        ("lightning", (2 * 16 * 16 * 4,)),
    ],
)
def test_page_buffers_of_states_are_those_of_the_tier(on_a_gpu, monkeypatch, model, part_bytes, stage):
    """The budget has only SGLang's parameters, because there is no pool yet; the tier uses the pool."""
    request = on_a_gpu(model, "fp4", TIER, stage=stage)
    params = request.configurator.mambaish_config.mamba2_cache_params
    layers = [layer for layer in range(*stage) if layer not in MLA_LAYERS]
    pool = MambaPool(size=2, spec_state_size=0, cache_params=params, mamba_layer_ids=layers, device="cpu")
    view = StateView.of([pool])
    assert view.group.bytes_per_page == len(layers) * sum(part_bytes)
    assert view.largest_part_bytes == max(part_bytes)

    charged = []
    monkeypatch.setattr(gpu_engine, "staged_state_bytes", lambda *sizes: charged.append(sizes) or sizes[0])
    page_bytes = request.view.page_size * 416
    rows = 8 * 16 * page_bytes * len([layer for layer in MLA_LAYERS if layer in range(*stage)])
    states = gpu_engine.buffer_bytes(view.group.bytes_per_page)
    assert budget.page_buffer_bytes(request) == rows + states
    assert charged == [(view.group.bytes_per_page, view.largest_part_bytes)]


@pytest.mark.parametrize("draft_tokens", [None, 4])
def test_workspaces_of_attention_on_a_gpu_are_charged(on_a_gpu, monkeypatch, draft_tokens):
    """65536 decoded bf16 rows for prefill, and the partial results of splits in decode, at any batch size."""
    assert budget.attention_workspace_bytes(on_a_gpu("mla3", "fp4", device="cpu")) == 0
    request = on_a_gpu("mla3", "fp4")
    monkeypatch.setattr(runtime_context, "max_speculative_num_draft_tokens", lambda: draft_tokens)
    found = budget.attention_workspace_bytes(request) - 65536 * 576 * 2
    heads = request.model_config.num_attention_heads
    for queries in range(1, (draft_tokens or 1) + 1):
        of_lists = {"queries_per_list": queries, "sm_count": 132}
        for count in (queries * requests for requests in (1, 7, 66, 67, 500)):
            assert found >= workspace_bytes(request.row_format, heads, count, 100_000, **of_lists)
    assert found <= 2 * 132 * 64 * 513 * 4  # a tile of 64 query-head rows per program, two rounds
