"""SGLang's KVCacheConfigurator of a server, without the model runner that SGLang makes it from."""

from types import SimpleNamespace

import torch


def drafting(layers):
    """SGLang's record of that many layers of multi-token prediction; 0 without drafts."""
    from sglang.srt.model_executor.model_runner_components.spec_aux_hidden_state import (
        SpecAuxHiddenStateConfig,
    )

    draft = SimpleNamespace(num_nextn_predict_layers=layers) if layers else None
    return SpecAuxHiddenStateConfig(eagle_draft_num_layers=layers, draft_model_config=draft)


def configurator(args, model_config, dtype, *, draft=False, eagle=0, stage=(0, 3), **fields):
    """The object of the real class, with the fields that sizing and building of MLA pools read.

    `eagle` is a draft's number of layers, `stage` the first layer of the rank and the one behind its last.
    """
    from sglang.srt.configs.hybrid_arch import mambaish_config
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    start, end = stage
    kvc = object.__new__(KVCacheConfigurator)
    values = {
        "server_args": args,
        "model_config": model_config,
        "device": "cpu",
        "model": torch.nn.Module(),
        "kv_cache_dtype": dtype,
        "kv_cache_dtype_str": None,
        "use_mla_backend": True,
        "is_draft_worker": draft,
        "token_to_kv_pool_allocator": None,
        "pp_size": 1,
        "attn_dp_size": 1,
        "kv_shard_spec": None,
        "kv_shard_rank": None,
        "kv_shard_group": None,
        "is_hybrid_swa": False,
        "mambaish_config": mambaish_config(model_config),
        "spec_algorithm": SpeculativeAlgorithm.EAGLE if eagle else SpeculativeAlgorithm.NONE,
        "spec_aux_config": drafting(eagle),
        "layer_info": SimpleNamespace(start_layer=start, end_layer=end, num_effective_layers=end - start),
    }
    for name, value in {**values, **fields}.items():
        setattr(kvc, name, value)
    return kvc
