"""SGLang's own hybrid models, on the meta device: which layers our backend attends."""

from types import SimpleNamespace

import pytest
import torch
from hybrid_case import LAYERS, MLA_LAYERS, model_configuration
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.rotary_embedding import base as rotary
from sglang.srt.runtime_context import get_parallel

from sgl_kvpool.srt.attention.layers import check_layers
from sgl_kvpool.srt.pool.k_scales import collect_k_scales

pytestmark = pytest.mark.usefixtures("published")

WIDTH = 576
#: Model name, kind of its linear layers, its MLA layers.
TARGETS = [
    ("KimiLinear", "kda", MLA_LAYERS),
    ("BailingMoeV2_5", "lightning", (3, 7)),
    ("BailingMoeV3", "kda-v3", MLA_LAYERS),
]


@pytest.fixture
def build(monkeypatch):
    """`build(name, kind, **config)`: a model of SGLang on the meta device."""
    from sglang.srt.models import bailing_moe_linear, bailing_moe_nextn, bailing_moe_v3, kimi_linear

    classes = {
        "KimiLinear": kimi_linear.KimiLinearForCausalLM,
        "BailingMoeV2_5": bailing_moe_linear.BailingMoeV2_5ForCausalLM,
        "BailingMoeV3": bailing_moe_v3.BailingMoeV3ForCausalLM,
        "NextN": bailing_moe_nextn.BailingMoeForCausalLMNextN,
    }
    monkeypatch.setattr(rotary, "_is_cpu", True)  # otherwise it looks for vLLM's kernel
    # The RoPE of linear layers; on a CPU, SGLang has only MLA's.
    monkeypatch.setattr(bailing_moe_linear, "get_rope_wrapper", lambda *a, **named: None)
    stages = SimpleNamespace(is_first_rank=True, is_last_rank=True, rank_in_group=0, world_size=1)

    def run(name, kind, **changes):
        config = model_configuration(kind)
        if name == "BailingMoeV2_5":
            config.layer_group_size = 4  # every fourth layer; this model takes no list of layers
        for field, value in changes.items():
            setattr(config, field, value)
        with torch.device("meta"), get_parallel().override(pp_group=stages, tp_group=None):
            return classes[name](config=config)

    return run


def pool_of(layers, width=WIDTH):
    return SimpleNamespace(
        row_format=SimpleNamespace(head_dim=width), row_pool=SimpleNamespace(layer_num=len(layers)),
        kv_lora_rank=512, has_rows=lambda layer: layer in layers,
    )  # fmt: skip


def attentions(model):
    return {name: m for name, m in model.named_modules() if isinstance(m, RadixAttention)}


def check(model, pool, *, mha_form=True):
    check_layers(model, pool, mha_form=mha_form)


@pytest.mark.parametrize(("name", "kind", "layers"), TARGETS)
def test_targets(build, name, kind, layers):
    model = build(name, kind)
    absorbed = {m.layer_id for n, m in attentions(model).items() if n.endswith("attn_mqa")}
    assert absorbed == set(layers) == set(model.config.full_attention_layer_ids)
    check(model, pool_of(layers))
    others = {m.layer_id for m in attentions(model).values()} - absorbed
    # Lightning attention layers are modules of the same class.
    assert others == (set(range(LAYERS)) - absorbed if kind == "lightning" else set())
    if others:
        with pytest.raises(ValueError, match="keys 32 wide and not rows of 576"):
            check(model, pool_of(range(LAYERS)))
    with pytest.raises(ValueError, match="attn_mha .* keys 192 wide .*on a CPU; serve"):
        check(model, pool_of(layers), mha_form=False)


@pytest.mark.parametrize("kind", ["lightning", "kda-v3"])
def test_drafts_in_the_same_checkpoint(build, kind):
    """Their only layer has number 0 in SGLang's pool, whatever its number in the checkpoint."""
    model = build("NextN", kind)
    assert {m.layer_id for m in attentions(model).values()} == {0}
    check(model, pool_of([0]))
    assert collect_k_scales(model) == {}
    model.model.decoder.attention.attn_mqa.k_scale_float = 0.5
    model.model.decoder.attention.attn_mha.k_scale_float = 1.0
    assert collect_k_scales(model) == {0: 0.5}


def test_scales_of_linear_layers_are_not_those_of_rows(build):
    """SGLang's loader sets a k_scale on every module of the class; the pool refuses layers without rows."""
    model = build("BailingMoeV2_5", "lightning")
    for module in attentions(model).values():
        module.k_scale_float = 0.25
    assert collect_k_scales(model) == {3: 0.25, 7: 0.25}


def test_rows_without_rotary_values_and_a_model_with_them(build):
    """Bailing's third version with `use_mla_nope` and `qk_rope_head_dim`: SGLang's pool omits rope."""
    model = build("BailingMoeV3", "kda-v3", use_mla_nope=True)
    with pytest.raises(ValueError, match="attn_mqa .*keys 576 wide and not rows of 512 values"):
        check(model, pool_of(MLA_LAYERS, width=512))
    check(build("BailingMoeV3", "kda-v3", use_mla_nope=True, qk_rope_head_dim=0), pool_of(MLA_LAYERS, 512))


def test_full_attention_that_is_not_mla(build):
    with pytest.raises(ValueError, match=r"layers.3.attention.attn .*keys 32 wide and not rows of 576"):
        check(build("BailingMoeV2_5", "lightning", full_attention_type="gqa"), pool_of([3, 7]))


def test_a_stage_without_mla():
    """A pipeline stage whose layers all keep states has a pool of no layers, and nothing to attend."""
    stage = torch.nn.Linear(1, 1)
    check(stage, pool_of([]))
    with pytest.raises(ValueError, match="has no attention layer"):
        check(stage, pool_of([1]))


def test_kimi_k3():
    """DeepSeek's class with a gate between the backend and `o_proj`."""
    from sglang.srt.models.deepseek_v2 import DeepseekV2AttentionMLA
    from sglang.srt.models.kimi_k3 import KimiK3MLAAttention

    assert issubclass(KimiK3MLAAttention, DeepseekV2AttentionMLA)
    for method in ("forward_prepare", "forward_core", "forward_absorb_core", "forward_normal_core"):
        assert getattr(KimiK3MLAAttention, method) is getattr(DeepseekV2AttentionMLA, method)
    config = model_configuration("kda")
    config.q_lora_rank, config.mla_use_output_gate = 48, True
    with torch.device("meta"):
        check(torch.nn.ModuleList([KimiK3MLAAttention(config, 6)]), pool_of(MLA_LAYERS))
