"""The checkpoints that servers on a GPU are tested with, loaded into SGLang's own classes on the CPU.

Every parameter is NaN before loading and none after, except those that a draft takes from its target. So the
file has each under the name that SGLang looks for; SGLang's loader refuses a wrong shape.
"""

import importlib.util
from pathlib import Path

import pytest
import random_deepseek
import random_hybrid
import torch
from loaded_checkpoints import config_of, loaded
from safetensors.torch import load_file

HYBRIDS = random_hybrid.CONFIGS
SHAPES = [*random_deepseek.SHAPES, *HYBRIDS]
#: Weights that a draft takes from its target.
SHARED = {"model.embed_tokens.weight", "model.word_embeddings.weight", "lm_head.weight"}


@pytest.fixture(scope="module")
def checkpoints(published, tmp_path_factory):
    root = tmp_path_factory.mktemp("checkpoints")
    return {shape: (random_hybrid if shape in HYBRIDS else random_deepseek).write(root / shape, shape)
            for shape in SHAPES}  # fmt: skip


def values(tensors):
    return sum(tensor.numel() for tensor in tensors)


@pytest.mark.parametrize("draft", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_parameter_is_loaded(shape, draft, checkpoints, monkeypatch):
    """The files of hybrids hold nothing else: Bailing's loaders skip names they do not know."""
    if draft and shape == "kimi_linear":
        pytest.skip("a model without a draft")
    parameters, missing = loaded(checkpoints[shape], monkeypatch, draft=draft)
    assert missing == (SHARED & parameters.keys() if draft else set())
    assert len(missing) == 2 * draft
    indexers = [name for name in parameters if ".indexer." in name]
    layers = 1 if draft else random_deepseek.LAYERS
    assert len(indexers) == (5 * layers if shape in random_deepseek.SPARSE else 0)
    if shape in HYBRIDS:
        stored = load_file(checkpoints[shape] / "model.safetensors")
        prefix = f"model.layers.{random_hybrid.LAYERS}."
        own = [weight for name, weight in stored.items() if name.startswith(prefix) == draft]
        assert values(own) == values(p for name, p in parameters.items() if name not in missing)


def test_the_fused_indexer_is_loaded(checkpoints, monkeypatch):
    """On CUDA, an indexer that rotates interleaved pairs has one parameter for two weights of the file."""
    from sglang.srt.layers.attention.dsa import dsa_indexer

    monkeypatch.setattr(dsa_indexer, "_is_cuda", True)
    monkeypatch.setattr(dsa_indexer, "resolve_num_sms", lambda: 132)
    parameters, missing = loaded(checkpoints["glm5"], monkeypatch)
    assert not missing
    assert "model.layers.0.self_attn.indexer.wk_weights_proj.weight" in parameters
    parameters, _ = loaded(checkpoints["deepseek_v32"], monkeypatch)
    assert "model.layers.0.self_attn.indexer.wk.weight" in parameters


@pytest.mark.parametrize("shape", SHAPES)
def test_what_sglang_makes_of_the_configuration(shape, checkpoints):
    from sglang.srt.configs.hybrid_arch import hybrid_kda_config, hybrid_lightning_config, mambaish_config
    from sglang.srt.configs.model_config import AttentionArch, dsa_layer_skips_topk, is_deepseek_dsa

    config = config_of(checkpoints[shape])
    assert config.attention_arch is AttentionArch.MLA
    assert (config.kv_lora_rank, config.qk_rope_head_dim, config.dtype) == (512, 64, torch.bfloat16)
    sparse = shape in random_deepseek.SPARSE
    assert is_deepseek_dsa(config.hf_config) is sparse
    if sparse:
        assert config.hf_config.index_topk == random_deepseek.INDEX_TOPK
        assert not any(dsa_layer_skips_topk(config.hf_config, layer) for layer in range(4))
    if shape in HYBRIDS:
        hybrid = mambaish_config(config)
        assert tuple(hybrid.full_attention_layer_ids) == random_hybrid.MLA_LAYERS[shape]
        assert (hybrid_lightning_config(config) is hybrid) is (shape == "lightning")
        assert (hybrid_kda_config(config) is hybrid) is (shape != "lightning")


def test_the_only_number_of_selected_tokens(published):
    """The reason for `INDEX_TOPK`: SGLang's kernel for slot lists in prefills takes no other number."""
    [folder] = importlib.util.find_spec("sgl_kernel").submodule_search_locations
    assert f"assert topk == {random_deepseek.INDEX_TOPK}" in (Path(folder) / "top_k.py").read_text()


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
