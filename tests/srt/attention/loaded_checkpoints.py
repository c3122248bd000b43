"""Checkpoints loaded into SGLang's own classes on the CPU."""

import importlib
from contextlib import ExitStack
from types import SimpleNamespace

import torch

#: Modules of SGLang's classes; the registry would import every model.
MODULES = {
    "DeepseekV3ForCausalLM": "deepseek_v2",
    "DeepseekV32ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLMNextN": "deepseek_nextn",
    "GlmMoeDsaForCausalLM": "glm4_moe",
    "GlmMoeDsaForCausalLMNextN": "glm4_moe",
    "KimiLinearForCausalLM": "kimi_linear",
    "BailingMoeV2_5ForCausalLM": "bailing_moe_linear",
    "BailingMoeV3ForCausalLM": "bailing_moe_v3",
    "BailingMoeForCausalLMNextN": "bailing_moe_nextn",
}


def config_of(folder, draft=False):
    from sglang.srt.configs.model_config import ModelConfig

    return ModelConfig(str(folder), is_draft_model=draft)


def loaded(folder, monkeypatch, draft=False):
    """The parameters of SGLang's model after loading, and the names of parameters that still hold NaN.

    All parameters are filled with NaN before they are loaded.
    """
    from safetensors.torch import load_file
    from sglang.srt.layers.rotary_embedding import base, factory, rope_variant
    from sglang.srt.runtime_context import get_parallel

    # Without a GPU, SGLang's RoPE looks for vLLM's kernel, and get_rope_cpu has only DeepSeek's scaled RoPE.
    monkeypatch.setattr(base, "_is_cpu", True)
    monkeypatch.setattr(factory, "get_rope_cpu", lambda *arguments: factory.get_rope(*arguments[:-1]))
    # Bailing uses DeepSeek's scaled RoPE with a factor of one.
    monkeypatch.setattr(rope_variant, "get_device", lambda: "cpu")
    config = config_of(folder, draft).hf_config
    [name] = config.architectures
    module = importlib.import_module(f"sglang.srt.models.{MODULES[name]}")
    alone = SimpleNamespace(rank_in_group=0, world_size=1, is_first_rank=True, is_last_rank=True)
    with ExitStack() as stack:
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(torch.bfloat16)
        stack.enter_context(get_parallel().override(pp_group=alone, tp_group=None))
        model = getattr(module, name)(config=config)
        parameters = dict(model.named_parameters())
        for parameter in parameters.values():
            parameter.data.fill_(float("nan"))
        [path] = folder.glob("*.safetensors")
        model.load_weights(load_file(path).items())
    return parameters, {name for name, p in parameters.items() if not p.float().isfinite().all()}
