"""The checkpoints that servers on a GPU are tested with, loaded into SGLang's own classes on the CPU.

Every parameter is NaN before loading and none after, except those that a draft takes from its target. So the
file has each under the name that SGLang looks for; SGLang's loader refuses a wrong shape.
"""

import importlib.util
from pathlib import Path

import pytest
import random_deepseek
import torch
from loaded_checkpoints import config_of, loaded

#: Weights that the draft takes from its target.
SHARED = {"model.embed_tokens.weight", "lm_head.weight"}


@pytest.fixture(scope="module")
def checkpoints(published, tmp_path_factory):
    pytest.importorskip("sglang")
    root = tmp_path_factory.mktemp("checkpoints")
    return {shape: random_deepseek.write(root / shape, shape) for shape in random_deepseek.SHAPES}


@pytest.mark.parametrize("shape", random_deepseek.SHAPES)
def test_every_parameter_is_loaded(shape, checkpoints, monkeypatch):
    parameters, missing = loaded(checkpoints[shape], monkeypatch)
    assert not missing
    indexers = [name for name in parameters if ".indexer." in name]
    assert len(indexers) == (5 * random_deepseek.LAYERS if shape in random_deepseek.SPARSE else 0)


@pytest.mark.parametrize("shape", random_deepseek.SHAPES)
def test_every_parameter_of_the_draft_is_loaded(shape, checkpoints, monkeypatch):
    parameters, missing = loaded(checkpoints[shape], monkeypatch, draft=True)
    assert missing == SHARED
    indexers = [name for name in parameters if ".indexer." in name]
    assert len(indexers) == (5 if shape in random_deepseek.SPARSE else 0)


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


@pytest.mark.parametrize("shape", random_deepseek.SHAPES)
def test_what_sglang_makes_of_the_configuration(shape, checkpoints):
    from sglang.srt.configs.model_config import AttentionArch, dsa_layer_skips_topk, is_deepseek_dsa

    config = config_of(checkpoints[shape])
    assert config.attention_arch is AttentionArch.MLA
    assert (config.kv_lora_rank, config.qk_rope_head_dim, config.dtype) == (512, 64, torch.bfloat16)
    sparse = shape in random_deepseek.SPARSE
    assert is_deepseek_dsa(config.hf_config) is sparse
    if sparse:
        assert config.hf_config.index_topk == random_deepseek.INDEX_TOPK
        assert not any(dsa_layer_skips_topk(config.hf_config, layer) for layer in range(4))


def test_the_only_number_of_selected_tokens(published):
    """The reason for `INDEX_TOPK`: SGLang's kernel for slot lists in prefills takes no other number."""
    [folder] = importlib.util.find_spec("sgl_kernel").submodule_search_locations
    assert f"assert topk == {random_deepseek.INDEX_TOPK}" in (Path(folder) / "top_k.py").read_text()
