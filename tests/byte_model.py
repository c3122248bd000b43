"""The byte model over whole sequences, and its checkpoints, which open like any other.

============================  =====================================================
``config.json``               the shape, and the fields of an MLA model for SGLang
``tokenizer.json``            one token per byte; a byte's token id is its value
``tokenizer_config.json``     lets ``AutoTokenizer`` open tokenizer.json
``model.safetensors``         the weights, named as in :class:`~sgl_kvpool.demo.net.ByteMLA`
============================  =====================================================

Importing this module does not import SGLang.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from sgl_kvpool.demo.net import SPECIAL_TOKEN_ID, ByteMLA, ByteMLAConfig, LatentAttention, rotation
from sgl_kvpool.demo.smollm2 import dense_mla, write_json, write_tokenizer_files

#: The text of token 256, which the tokenizer never adds by default.
SPECIAL_TOKEN = "<|endoftext|>"


def expanded(attention: LatentAttention, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Causal attention over ``[B, T]`` with keys and values of each head."""
    c = attention.config
    q_nope, q_rope, latent, k_rope = attention.project(x, cos, sin)
    up = attention.kv_b_proj(latent).unflatten(-1, (c.heads, -1))
    k_nope, v = up.split([c.qk_nope_head_dim, c.v_head_dim], dim=-1)
    q = torch.cat([q_nope, q_rope], dim=-1)
    k = torch.cat([k_nope, k_rope[..., None, :].expand_as(q_rope)], dim=-1)
    out = functional.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, scale=c.scale
    )
    return attention.o_proj(out.transpose(1, 2).flatten(-2))


class WholeSequences(ByteMLA):
    """The model of training: ``net(ids [B, T])`` gives logits ``[B, T, vocab_size]`` of the next token.

    The same parameters run in the absorbed form, or expanded: keys and values of each head are computed from
    the latent, which is cheaper for whole sequences. Both are equal up to rounding.
    """

    def forward(self, ids: Tensor, absorbed: bool = False) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        if absorbed:
            return self.lm_head(self.hidden_states(ids, positions, self._attend))
        cos, sin = rotation(positions, self.config)
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = x + expanded(layer.self_attn, layer.input_layernorm(x), cos, sin)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.lm_head(self.norm(x))

    def _attend(self, layer: int, q: Tensor, k: Tensor) -> Tensor:
        """Causal attention over ``[B, T]`` rows, without a cache."""
        rows = k[:, None].expand(-1, self.config.heads, -1, -1)
        values = rows[..., : self.config.kv_lora_rank]
        out = functional.scaled_dot_product_attention(
            q.transpose(1, 2), rows, values, is_causal=True, scale=self.config.scale
        )
        return out.transpose(1, 2)


def write_config(folder: str | Path, config: ByteMLAConfig) -> None:
    special = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), SPECIAL_TOKEN_ID)
    fields = dense_mla(config.layers, config.intermediate_size)
    write_json(
        Path(folder) / "config.json", {**fields, "tie_word_embeddings": False, **special, **config.to_hf()}
    )


def read_config(folder: str | Path) -> ByteMLAConfig:
    """The shape in a folder's config.json."""
    return ByteMLAConfig.from_hf(json.loads((Path(folder) / "config.json").read_text("utf-8")))


def byte_alphabet() -> list[str]:
    """The printable character that stands for each byte in a byte-level vocabulary.

    The printable characters of Latin-1 (no spaces, no soft hyphen) stand for themselves; the other
    bytes take the characters from U+0100 on, in order.
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte if byte in visible else next(spare)) for byte in range(256)]


def write_tokenizer(folder: str | Path) -> None:
    """Write tokenizer.json and tokenizer_config.json.

    The tokens of a text are the bytes of its UTF-8 form, without added or merged tokens, so
    ``encode(text) == list(text.encode())``. The only exception is the text of the special token, 256.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocab = {character: byte for byte, character in enumerate(byte_alphabet())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(SPECIAL_TOKEN, special=True, normalized=False)])
    write_tokenizer_files(
        Path(folder),
        tokenizer,
        dict.fromkeys(("bos_token", "eos_token", "pad_token"), SPECIAL_TOKEN),
        ByteMLAConfig.context_length,
        "{% for message in messages %}{{ message['content'] }}\n{% endfor %}",
    )


def write_model(folder: str | Path, net: WholeSequences) -> Path:
    """Write a whole checkpoint, weights as bfloat16, and return its folder."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_config(folder, net.config)
    write_tokenizer(folder)
    weights = {
        name: tensor.detach().to("cpu", torch.bfloat16).contiguous()
        for name, tensor in net.state_dict().items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def read_model(folder: str | Path, dtype: torch.dtype = torch.float32) -> WholeSequences:
    """The model of a checkpoint, its weights converted to `dtype`, in evaluation mode."""
    net = WholeSequences(read_config(folder))
    net.load_state_dict(load_file(Path(folder) / "model.safetensors"), strict=True)
    return net.to(dtype).eval()


@torch.no_grad()
def initialise(
    net: WholeSequences, seed: int, *, score_gain: float = 1.0, logit_gain: float = 0.1
) -> WholeSequences:
    """Fill the parameters from `seed` and return `net`. The defaults suit training."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in net.named_parameters():
        if parameter.ndim == 1:
            parameter.fill_(1.0)
            continue
        gain = {"q_proj": score_gain, "lm_head": logit_gain}.get(name.split(".")[-2], 1.0)
        std = gain if name.startswith("embed_tokens") else gain * parameter.shape[1] ** -0.5
        # Drawn on the CPU in fp32, so that a seed gives the same weights on all machines.
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
    # The special token gets the logit 0, so that greedy text never ends: the largest of the 256 other logits
    # is above 0.
    net.lm_head.weight[SPECIAL_TOKEN_ID:] = 0
    return net
