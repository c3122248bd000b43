"""Checkpoints that copy: the next token is the one `PERIOD` tokens back, in the target and in its draft.

Attention of every layer, the draft's too, looks at one position: RoPE parts of queries and keys are constant,
and their product is highest `PERIOD - 1` tokens back. What it finds there, a token's code of random signs, is
the answer. So drafts are accepted only while the draft finds its own rows, and index keys of sparse models,
whose scores also depend on positions alone, decide what is found. Weights are computed, not trained.
"""

import json
from pathlib import Path

import random_deepseek
import torch

PERIOD = 100
#: Values of a token's code; the rest of the hidden state holds what attention found, and a constant.
CODE = 192
_FOUND = slice(CODE, 2 * CODE)
_CONSTANT, _CONSTANT_VALUE = 500, 12.0
#: Score of a pair of RoPE values at the right distance. At a neighbouring one, the pairs' scores are 13 less.
_SHARPNESS = 10.0
#: What a layer adds to the hidden state, and the logits: small, so that norms stay, and odds are finite.
_ADDED, _HEAD = 0.3, 0.05
#: The draft reads codes this much smaller, beside noise, and so takes some tokens for others.
_DRAFT_CODE, NOISE = 0.2, 0.042


def write(
    folder: Path, shape: str, *, noise: float = NOISE, lists_differ: bool = False, **shape_changes
) -> Path:
    """Write a checkpoint of a shape of `random_deepseek`, which may be changed; returns its folder.

    `lists_differ`: the first layer's indexer leaves the position out, the other layers outvote it.
    """
    from safetensors.torch import load_file, save_file

    folder = random_deepseek.write(folder, shape, **shape_changes)
    [path] = folder.glob("*.safetensors")
    weights = load_file(path)
    config = random_deepseek.config_of(shape, **shape_changes)
    draw = torch.Generator().manual_seed(11)
    codes = torch.randint(0, 2, (random_deepseek.VOCAB, CODE), generator=draw).float() * 2 - 1
    embedding = torch.zeros(len(codes), config.hidden_size)
    embedding[:, :CODE] = codes
    embedding[:, _CONSTANT] = _CONSTANT_VALUE
    head = torch.zeros_like(embedding)
    head[:, _FOUND] = codes * _HEAD
    changed = {"model.embed_tokens.weight": embedding, "lm_head.weight": head}
    for layer in range(random_deepseek.LAYERS + 1):
        prefix = f"model.layers.{layer}."
        changed |= {f"{prefix}self_attn.{name}": w for name, w in _attention(config).items()}
        if shape in random_deepseek.SPARSE:
            changed |= {f"{prefix}self_attn.indexer.{name}": w for name, w in _indexer(config).items()}
            if lists_differ and layer == 0:
                changed[f"{prefix}self_attn.indexer.weights_proj.weight"] *= -1
        # Experts add nothing.
        changed |= {n: w * 0 for n, w in weights.items() if n.startswith(prefix) and "down_proj" in n}
    draft = f"model.layers.{random_deepseek.LAYERS}."
    mixed = torch.randn(config.hidden_size, config.hidden_size, generator=draw) * noise
    mixed[CODE:] = 0
    read = torch.eye(config.hidden_size)
    read[:CODE] *= _DRAFT_CODE
    project = torch.cat([read + mixed, torch.zeros_like(mixed)], 1)  # of the token, not of the target's state
    changed |= {
        f"{draft}eh_proj.weight": project,
        f"{draft}embed_tokens.weight": embedding,
        f"{draft}shared_head.head.weight": head,
    }
    missing = changed.keys() - weights.keys()
    assert not missing, missing
    weights |= {name: w.to(weights[name].dtype).contiguous() for name, w in changed.items()}
    save_file(weights, path, metadata={"format": "pt"})
    return folder


def write_eagle3(folder: Path, target: Path) -> Path:
    """Write an EAGLE3 draft with MLA for a dense target of `write`; returns its folder.

    It copies too, from embeddings alone. A later step of a chain adds to what the step before found, so only
    the first step is certainly right.
    """
    from safetensors.torch import load_file, save_file

    config = random_deepseek.config_of("deepseek_v3")
    hidden, ones = config.hidden_size, torch.ones
    attention = _attention(config)
    for name in ("q_a_proj.weight", "kv_a_proj_with_mqa.weight"):  # beside the embedding, the target's state
        attention[name] = torch.cat([attention[name], torch.zeros_like(attention[name])], 1)
    attention["q_a_layernorm.weight"] = ones(config.q_lora_rank)
    attention["kv_a_layernorm.weight"] = ones(config.kv_lora_rank)
    [weights] = target.glob("*.safetensors")
    found = load_file(weights)
    draft = {"lm_head.weight": found["lm_head.weight"], "fc.weight": torch.zeros(hidden, 2 * hidden)}
    draft |= {"norm.weight": ones(hidden), "embed_tokens.weight": found["model.embed_tokens.weight"]}
    draft |= {f"layers.0.self_attn.{name}": weight for name, weight in attention.items()}
    for norm in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        draft[f"layers.0.{norm}.weight"] = ones(hidden)
    for name in ("gate", "up", "down"):
        draft[f"layers.0.mlp.{name}_proj.weight"] = torch.zeros(hidden, hidden)
    folder.mkdir()
    save_file({n: w.bfloat16().contiguous() for n, w in draft.items()}, folder / "model.safetensors")
    written = json.loads((target / "config.json").read_text())
    del written["num_nextn_predict_layers"]
    written |= {"architectures": ["Eagle3DeepseekV2ForCausalLM"], "num_hidden_layers": 1}
    written |= {"draft_vocab_size": random_deepseek.VOCAB}
    written["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [2, 1], "use_aux_hidden_state": True}
    (folder / "config.json").write_text(json.dumps(written))
    return folder


def continued(ids: list[int], count: int) -> list[int]:
    """The tokens that follow a prompt of at least `PERIOD` tokens."""
    found = list(ids)
    for _ in range(count):
        found.append(found[-PERIOD])
    return found[len(ids) :]


def _constants(config, distance: int, is_interleaved: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """RoPE values of a query and a key; after both are rotated, their product is highest at a distance."""
    pairs = config.qk_rope_head_dim // 2
    angle = distance * config.rope_parameters["rope_theta"] ** (
        -torch.arange(pairs, dtype=torch.float64) / pairs
    )
    # A query rotated by t and a key rotated by t - d have the angle d between them.
    query = torch.stack([angle.cos(), -angle.sin()], -1)
    key = torch.tensor([1.0, 0.0]).expand(pairs, 2)
    return tuple((x if is_interleaved else x.T).reshape(-1).float() for x in (query, key))


def _attention(config) -> dict[str, torch.Tensor]:
    heads, nope, rope = config.num_attention_heads, config.qk_nope_head_dim, config.qk_rope_head_dim
    rank, hidden, values = config.kv_lora_rank, config.hidden_size, config.v_head_dim
    q_a = torch.zeros(config.q_lora_rank, hidden)
    q_a[0, _CONSTANT] = 1.0
    # After its norm, the only value that is not zero is the square root of their number.
    scale = config.q_lora_rank**-0.5 * _SHARPNESS * (nope + rope) ** 0.5
    q_b = torch.zeros(heads, nope + rope, config.q_lora_rank)
    query, key = _constants(config, PERIOD - 1)
    q_b[:, nope:, 0] = query * scale
    kv_a = torch.zeros(rank + rope, hidden)
    kv_a[:CODE, :CODE] = torch.eye(CODE)
    kv_a[rank:, _CONSTANT] = key / _CONSTANT_VALUE
    kv_b = torch.zeros(heads, nope + values, rank)
    out = torch.zeros(hidden, heads, values)
    for head in range(heads):
        part = torch.arange(head, CODE, heads)
        kv_b[head, nope + torch.arange(len(part)), part] = 1.0
        out[CODE + part, head, torch.arange(len(part))] = _ADDED
    return {
        "q_a_proj.weight": q_a,
        "q_b_proj.weight": q_b.flatten(0, 1),
        "kv_a_proj_with_mqa.weight": kv_a,
        "kv_b_proj.weight": kv_b.flatten(0, 1),
        "o_proj.weight": out.flatten(1),
    }


def _indexer(config) -> dict[str, torch.Tensor]:
    """Keys are the norm's bias, queries are constant, and so are the weights of heads."""
    heads, width, rope = config.index_n_heads, config.index_head_dim, config.qk_rope_head_dim
    bias = torch.zeros(width)
    query, bias[:rope] = _constants(config, PERIOD - 1, getattr(config, "indexer_rope_interleave", False))
    wq = torch.zeros(heads, width, config.q_lora_rank)
    wq[:, :rope, 0] = query / config.q_lora_rank**0.5
    weights = torch.zeros(heads, config.hidden_size)
    weights[:, _CONSTANT] = 1.0
    return {
        "wq_b.weight": wq.flatten(0, 1),
        "k_norm.weight": torch.zeros(width),
        "k_norm.bias": bias,
        "weights_proj.weight": weights,
    }
