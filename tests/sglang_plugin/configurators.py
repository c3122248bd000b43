"""SGLang's KVCacheConfigurator of a server, without the model runner from which SGLang makes it."""

from types import SimpleNamespace

import torch


def drafting(layers):
    """SGLang's record of a draft with `layers` multi-token prediction layers; 0 means no draft."""
    from sglang.srt.model_executor.model_runner_components import spec_aux_hidden_state

    draft = SimpleNamespace(num_nextn_predict_layers=layers) if layers else None
    config = spec_aux_hidden_state.SpecAuxHiddenStateConfig
    return config(eagle_draft_num_layers=layers, draft_model_config=draft)


def configurator(args, model_config, dtype, *, draft=False, eagle=0, stage=(0, 3), **fields):
    """SGLang's KVCacheConfigurator, with the fields that a model runner would set.

    `eagle` is the number of a draft's layers, `stage` the half-open range of the rank's layers.
    """
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
    from sglang.srt.model_executor.model_runner_components.layer_setup import ModelLayerInfo
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    start, end = stage
    nothing = ("pp_group", "sliding_window_size", "forward_stream", "req_to_token_pool")
    values = {
        **dict.fromkeys((*nothing, "token_to_kv_pool_allocator", "memory_pool_config")),
        **dict.fromkeys(("post_capture_kv_active", "is_hybrid_swa", "is_hybrid_swa_compress"), False),
        **dict.fromkeys(("attn_dp_size", "pp_size"), 1),
        "device": "cpu",
        "gpu_id": 0,
        "model": torch.nn.Module(),
        "model_config": model_config,
        "server_args": args,
        "kv_cache_dtype": dtype,
        "model_dtype": torch.bfloat16,
        "page_size": args.page_size,
        "spec_algorithm": SpeculativeAlgorithm.EAGLE if eagle else SpeculativeAlgorithm.NONE,
        "is_draft_worker": draft,
        "spec_aux_config": drafting(eagle),
        "use_mla_backend": True,
        "layer_info": ModelLayerInfo(start_layer=start, end_layer=end, num_effective_layers=end - start),
    }
    return KVCacheConfigurator(**{**values, **fields})


def sizes_of(kvc):
    from sglang.srt.model_executor.pool_configurator import DefaultPoolConfigurator

    return DefaultPoolConfigurator(kvc)


def classes_of(kvc):
    """The classes of all kinds that SGLang selects before it builds any pool, whatever the model is."""
    from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool, MHATokenToKVPool, MLATokenToKVPool

    defaults = {"mha": MHATokenToKVPool, "mla": MLATokenToKVPool, "dsa": DSATokenToKVPool}
    return {kind: kvc._resolve_kv_pool_class(kind=kind, default=pool) for kind, pool in defaults.items()}
