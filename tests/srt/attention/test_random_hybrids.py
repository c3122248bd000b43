"""The hybrids that servers on a GPU are tested with, loaded into SGLang's own classes on the CPU.

As in `test_random_checkpoints`, parameters are NaN before loading, and only shared ones of drafts after.
"""

import pytest
import random_hybrid
import torch
from loaded_checkpoints import config_of, loaded
from safetensors.torch import load_file

BAILING = [shape for shape in random_hybrid.CONFIGS if shape != "kimi_linear"]
#: Weights that the draft takes from its target.
SHARED = {"model.word_embeddings.weight", "lm_head.weight"}


@pytest.fixture(scope="module")
def checkpoints(published, tmp_path_factory):
    pytest.importorskip("sglang")
    root = tmp_path_factory.mktemp("checkpoints")
    return {shape: random_hybrid.write(root / shape, shape) for shape in random_hybrid.CONFIGS}


def values(tensors):
    return sum(tensor.numel() for tensor in tensors)


@pytest.mark.parametrize("shape", random_hybrid.CONFIGS)
def test_every_parameter_is_loaded(shape, checkpoints, monkeypatch):
    """The file holds nothing else: Bailing's loaders skip names they do not know."""
    parameters, missing = loaded(checkpoints[shape], monkeypatch)
    assert not missing
    stored = load_file(checkpoints[shape] / "model.safetensors")
    draft = f"model.layers.{random_hybrid.LAYERS}."
    target = [weight for name, weight in stored.items() if not name.startswith(draft)]
    assert values(target) == values(parameters.values())


@pytest.mark.parametrize("shape", BAILING)
def test_every_parameter_of_the_draft_is_loaded(shape, checkpoints, monkeypatch):
    parameters, missing = loaded(checkpoints[shape], monkeypatch, draft=True)
    assert missing == SHARED
    stored = load_file(checkpoints[shape] / "model.safetensors")
    draft = f"model.layers.{random_hybrid.LAYERS}."
    own = [weight for name, weight in stored.items() if name.startswith(draft)]
    assert values(own) == values(p for name, p in parameters.items() if name not in SHARED)


@pytest.mark.parametrize("shape", random_hybrid.CONFIGS)
def test_what_sglang_makes_of_the_configuration(shape, checkpoints):
    from sglang.srt.configs.hybrid_arch import hybrid_kda_config, hybrid_lightning_config, mambaish_config
    from sglang.srt.configs.model_config import AttentionArch

    config = config_of(checkpoints[shape])
    assert config.attention_arch is AttentionArch.MLA
    assert (config.kv_lora_rank, config.qk_rope_head_dim, config.dtype) == (512, 64, torch.bfloat16)
    hybrid = mambaish_config(config)
    assert tuple(hybrid.full_attention_layer_ids) == random_hybrid.MLA_LAYERS[shape]
    assert (hybrid_lightning_config(config) is hybrid) is (shape == "lightning")
    assert (hybrid_kda_config(config) is hybrid) is (shape != "lightning")


def log_probabilities(logits):
    assert logits.isfinite().all()
    return logits.float().log_softmax(-1)


@torch.no_grad()
def test_kimi_logits_vary_and_depend_on_rows(checkpoints, monkeypatch):
    """Loads the file into transformers' class, so the weights have the published names."""
    from transformers.models.kimi_linear import KimiLinearForCausalLM, modeling_kimi_linear

    model = KimiLinearForCausalLM.from_pretrained(checkpoints["kimi_linear"]).eval()
    tokens = torch.randint(3, random_hybrid.VOCAB, (1, 100), generator=torch.Generator().manual_seed(0))
    said = log_probabilities(model(tokens).logits)
    assert len(said.argmax(-1).unique()) > 10
    attention = modeling_kimi_linear.KimiLinearAttention
    expand = attention.expand_kv
    monkeypatch.setattr(attention, "expand_kv", lambda self, *rows: expand(self, *(0 * r for r in rows)))
    assert (said - log_probabilities(model(tokens).logits)).abs().mean() > 0.5
