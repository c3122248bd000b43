"""A checkpoint of the hybrid model with random weights, which SGLang opens as KimiLinearForCausalLM.

The weights are scaled so that the greedy text depends on all of a prompt: states decay over five to
a thousand tokens, and attention scores have a standard deviation of 2. Nothing is trained.
"""

import json
import math
from pathlib import Path

import torch
from byte_model import write_tokenizer
from hybrid_net import HybridConfig, HybridNet
from safetensors.torch import save_file

from sgl_kvpool.demo.net import SPECIAL_TOKEN_ID


@torch.no_grad()
def random_net():
    """A net whose most probable byte is always a printable one, the same in every run."""
    net = HybridNet(HybridConfig())
    generator = torch.Generator().manual_seed(0)
    gains = {"q_proj": 2.0, "lm_head": 3.0, "f_b_proj": 0.5}
    for name, parameter in net.named_parameters():
        last = name.split(".")[-1]
        if last == "A_log":
            parameter.zero_()
        elif last == "dt_bias":
            # Through softplus: a token takes between a thousandth and a fifth off a row of the state.
            lost = torch.rand(parameter.shape, generator=generator) * math.log(200) + math.log(1e-3)
            parameter.copy_(torch.log(torch.expm1(lost.exp())))
        elif last == "conv_weight":
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
        elif parameter.ndim == 1:
            parameter.fill_(1.0)
        else:
            gain = gains.get(name.split(".")[-2], 1.0)
            std = gain if name.startswith("embed_tokens") else gain * parameter.shape[1] ** -0.5
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
    # Otherwise a byte could follow itself for ever, and tokens that are not text could win.
    net.lm_head.weight -= net.embed_tokens.weight / 32
    net.lm_head.weight[:0x20] = 0
    net.lm_head.weight[0x7F:] = 0
    return net


def hf_fields(config):
    """What config.json says of a shape."""
    linear = [i + 1 for i in config.linear_layers]
    return {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": SPECIAL_TOKEN_ID,
        "eos_token_id": SPECIAL_TOKEN_ID,
        "pad_token_id": SPECIAL_TOKEN_ID,
        "q_lora_rank": None,
        "mla_use_nope": False,
        "linear_attn_config": {
            # Counted from 1 in this config.
            "kda_layers": linear,
            "full_attn_layers": [i for i in range(1, config.mla.layers + 1) if i not in linear],
            "num_heads": config.linear_heads,
            "head_dim": config.linear_head_dim,
            "short_conv_kernel_size": config.window,
        },
        **config.mla.to_hf(),
    }


def write(folder):
    """Write the checkpoint, bfloat16 but for what SGLang keeps in fp32; returns the folder."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    net = random_net()
    (folder / "config.json").write_text(json.dumps(hf_fields(net.config), indent=2) + "\n", encoding="utf-8")
    write_tokenizer(folder)
    save_file(rounded(net), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def rounded(net):
    """Tensors of a net as they are stored."""
    wide = ("A_log", "dt_bias")
    return {
        name: tensor.contiguous() if name.endswith(wide) else tensor.to(torch.bfloat16).contiguous()
        for name, tensor in net.state_dict().items()
    }
