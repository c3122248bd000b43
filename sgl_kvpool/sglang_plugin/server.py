"""A server as rules and hooks see it: each fact that follows from its arguments, once; `Model` has others."""

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

from sgl_kvpool.layout import MLAKVCacheLayout, RowFormat
from sgl_kvpool.memory.arrangement import KVArrangement
from sgl_kvpool.sglang_plugin.options import KVPoolConfig, config_of
from sgl_kvpool.sglang_plugin.registry import fields, uses
from sgl_kvpool.srt.model import Model

uses("sglang.srt.arg_groups.overrides.resolving_view", "arguments", takes=("server_args",))
uses("sglang.srt.arg_groups.overrides.model_config_of", "arguments", takes=("server_args",))
uses("sglang.srt.arg_groups.overrides.attention_backends_of", "arguments", takes=("cfg",))
uses("sglang.srt.configs.model_config.is_deepseek_dsa", "model rules", takes=("config",))
uses("sglang.srt.configs.hybrid_arch.mambaish_config", "model rules", takes=("model_config",))
# Besides those in tables of the rules.
fields(
    *("attention_backend", "prefill_attention_backend", "decode_attention_backend", "chunked_prefill_size"),
    *("cp_strategy", "dcp_replicate_q_proj", "device", "disaggregation_transfer_backend"),
    *("dsa_decode_backend", "dsa_prefill_backend", "enable_hierarchical_cache", "enable_memory_saver"),
    *("enable_metrics", "enable_linear_replayssm", "enable_linear_replayssm_spec", "enable_mixed_chunk"),
    *("disable_radix_cache", "enable_weights_cpu_backup", "ep_join_mode"),
    *("flashinfer_mla_disable_ragged", "hicache_host_memory_fraction", "hicache_io_backend"),
    *("hicache_mem_layout", "hicache_storage_backend_extra_config", "kv_cache_dtype", "max_prefill_tokens"),
    *("mamba_radix_cache_strategy", "mamba_track_interval", "model_path", "rl_on_policy_target"),
    *("speculative_draft_attention_backend", "speculative_draft_kv_cache_dtype"),
    *("speculative_draft_model_path", "speculative_eagle_topk", "weight_version"),
)


class Server(Model):
    """A server's arguments and the facts that follow from them, each computed when it is first asked for.

    After a declaration to SGLang, rules get another `Server`.

    `server_args`: SGLang's ServerArgs, whose fields hold the user's values.
    `facts`: Facts that are known already, by name of a property.
    """

    def __init__(self, server_args: Any, **facts: Any) -> None:
        self.server_args = server_args
        vars(self).update(facts)

    @cached_property
    def config(self) -> KVPoolConfig:
        return config_of(self.server_args)

    @cached_property
    def view(self) -> Any:
        """The fields of ServerArgs, as SGLang has resolved them so far."""
        from sglang.srt.arg_groups.overrides import resolving_view

        return resolving_view(self.server_args)

    @cached_property
    def model_config(self) -> Any:
        """SGLang's ModelConfig of the target."""
        from sglang.srt.arg_groups.overrides import model_config_of

        return model_config_of(self.server_args)

    @cached_property
    def layout(self) -> MLAKVCacheLayout:
        assert self.config.layout is not None
        return self.config.layout

    @cached_property
    def arrangement(self) -> KVArrangement:
        return self.config.arrangement

    @cached_property
    def row_format(self) -> RowFormat:
        """Format of the pool's rows; ValueError for a geometry that no layout stores."""
        return self.row_format_in(self.layout)

    # ---------------------------------------------------------------- attention

    @cached_property
    def device_name(self) -> str:
        """Name of the device for messages; torch's "cuda" may be an AMD GPU."""
        return "ROCm" if self.view.device == "cuda" and is_rocm() else self.view.device

    @cached_property
    def backends(self) -> tuple[str | None, str | None]:
        """Attention backends (prefill, decode), None where SGLang has not chosen one yet."""
        from sglang.srt.arg_groups.overrides import attention_backends_of

        return attention_backends_of(self.view)

    @cached_property
    def has_own_draft(self) -> bool:
        """Whether the draft model is another checkpoint than the target's."""
        draft, target = self.view.speculative_draft_model_path, self.view.model_path
        if draft is None or draft == target:
            return False
        # Two spellings of one folder are one checkpoint.
        return not (Path(draft).is_dir() and Path(draft).resolve() == Path(target).resolve())

    # ---------------------------------------------------------------- ranks and the host tier

    @cached_property
    def same_rows_ranks(self) -> int:
        """Ranks that hold the rows of the same requests: those of attention's tensor parallelism."""
        return self.view.tp_size // (self.view.attn_dp_size * self.view.attn_cp_size)

    @cached_property
    def disaggregates(self) -> bool:
        """Whether prefill and decode are servers of their own."""
        return disaggregates(self.view.disaggregation_mode)

    @cached_property
    def has_host_tier(self) -> bool:
        """Whether the server will build a host tier."""
        # SGLang reads the offload argument on decode servers only.
        view = self.view
        offloads = view.disaggregation_mode == "decode" and view.disaggregation_decode_enable_offload_kvcache
        return bool(view.enable_hierarchical_cache or offloads)

    @cached_property
    def host_layout(self) -> MLAKVCacheLayout:
        return self.config.host_tier.host_layout(self.layout)

    @cached_property
    def has_our_tier(self) -> bool:
        """Whether the host tier of the rows will be ours, and not SGLang's own."""
        serves = self.config.host_tier.serves(self.layout, self.arrangement, self.view.device)
        # SGLang's tier takes the index keys of sparse models for as many as a rank has rows.
        return self.has_host_tier and (serves or (self.is_dsa and self.view.dcp_size > 1))


def disaggregates(mode: str | None) -> bool:
    """Whether a value of --disaggregation-mode splits prefill and decode."""
    return mode not in (None, "null")


def is_rocm() -> bool:
    """Whether torch's "cuda" device is an AMD GPU."""
    import torch

    return torch.version.hip is not None


#: A rule: it raises Refusal, or returns fields to declare to SGLang.
Rule = Callable[[Server], dict[str, Any] | None]
