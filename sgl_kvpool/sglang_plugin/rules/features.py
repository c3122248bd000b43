"""Features of SGLang that are refused with a layout, an arrangement or an attention backend, and why."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from sgl_kvpool.refusal import Refusal, Way, leave_out_one
from sgl_kvpool.sglang_plugin.options import ARRANGEMENT, LAYOUT
from sgl_kvpool.sglang_plugin.registry import fields
from sgl_kvpool.sglang_plugin.server import Server, disaggregates

#: Fields of SGLang's ServerArgs that name an attention backend of the target.
BACKEND_FIELDS = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")


def flag_of(field: str) -> str:
    return "--" + field.replace("_", "-")


@dataclass(frozen=True)
class Feature:
    """A server argument (a field of ServerArgs) that is refused, and the reason for messages."""

    field: str
    reason: str
    #: Whether the feature is on, by the field's value.
    in_use: Callable[[Any], bool] = bool
    #: The flag as the user writes it; by default `flag_of` the field.
    flag: str = ""
    #: Devices on which the feature is refused; by default all.
    devices: tuple[str, ...] | None = None
    #: The refused values in words, if only some are; for the page that lists refusals.
    values: str = ""

    def __post_init__(self) -> None:
        fields(self.field)
        if not self.flag:
            object.__setattr__(self, "flag", flag_of(self.field))

    def written(self, value: Any) -> str:
        """The feature's text on the command line, with its value if that is one word."""
        one_word = isinstance(value, int | float | str) and value is not True
        return f"{self.flag} {value}" if one_word else self.flag


def first_in_use(features: Iterable[Feature], server: Server) -> tuple[Feature, str] | None:
    """The first feature that a server uses, and how the user writes it; None if it uses none of them."""
    for feature in features:
        value = getattr(server.view, feature.field)
        if (feature.devices is None or server.view.device in feature.devices) and feature.in_use(value):
            return feature, feature.written(value)
    return None


def check_features(
    features: Iterable[Feature], server: Server, ours: str, ways_of: Callable[[str], Iterable[Way]]
) -> None:
    """Refuse a feature that a server uses and that does not work with `ours`; its flag has the ways out."""
    if (found := first_in_use(features, server)) is not None:
        feature, text = found
        ways = ways_of(feature.flag.split()[0])
        raise Refusal(f"{text} does not work with {ours}: {feature.reason}", *ways)


def check(server: Server) -> None:
    """Refuse arguments that do not work with layout and arrangement."""
    for features, option, value in (
        (LAYOUT_FEATURES, LAYOUT, server.layout),
        (ARRANGEMENT_FEATURES, ARRANGEMENT, server.arrangement),
    ):
        if option is LAYOUT or not server.arrangement.has_contiguous_layers:
            check_features(features, server, f"{option.flag} {value}", partial(leave_out_one, option.flag))


def above_one(field: str, reason: str) -> Feature:
    """A number of ranks above 1 that is refused."""
    return Feature(field, reason, in_use=lambda count: (count or 1) > 1, values="above 1")


def one_value(field: str, value: str, reason: str) -> Feature:
    """One value of an argument that is refused."""
    return Feature(field, reason, in_use=lambda given: given == value, values=value)


def _is_given(value: Any) -> bool:
    return value is not None


_OWN_POOL = "it allocates a pool of its own"
_OWN_ROWS = "it computes the bytes of a row by itself"
_LINKER = "its keys do not name the layout"
_RETRACTED = "SGLang's host pool for retracted requests supports multi-head pools only"

#: Features that build another pool, read rows without knowing the layout, or start schedulers without it.
LAYOUT_FEATURES = (
    Feature("enable_unified_memory", _OWN_POOL),
    Feature("enable_hisparse", _OWN_POOL),
    Feature("enable_kv_cache_sharding", "it shards stock MLA rows"),
    Feature("enable_dsa_cache_layer_split", _OWN_POOL),
    Feature("enable_page_major_kv_layout", _OWN_POOL),
    Feature("enable_unified_cache_external_linker", _LINKER),
    Feature("enable_linker_mla_dedup", _LINKER),
    Feature("enable_lmcache", _OWN_ROWS),
    Feature("enable_flexkv", _OWN_ROWS),
    Feature("radix_cache_backend", _OWN_ROWS, in_use=_is_given),
    Feature("use_ray", "Ray actors do not load SGLang plugins"),
    Feature(
        "disaggregation_decode_host_receive_threshold",
        _RETRACTED,
        in_use=lambda threshold: threshold < 1,
        values="below 1",
    ),
    one_value("disaggregation_decode_retraction_backup", "host_pool", _RETRACTED),
)

#: Features refused with arrangements in which rows of other layers lie between those of one.
ARRANGEMENT_FEATURES = (
    Feature(
        "disaggregation_mode",
        "SGLang sends a layer's pages as contiguous bytes, and here rows of other layers lie between them",
        in_use=disaggregates,
    ),
)


def _captures_whole_prefill(config: Any) -> bool:
    return config is not None and config.prefill.backend == "full"


_PREFILL_CP = "for dense MLA, SGLang splits prompts over ranks inside its fa3 backend, which reads bf16"

#: Features that have not been shown to be right with `kvpool_mla`.
BACKEND_FEATURES = (
    Feature("enable_pdmux", "prefill and decode would share the buffers of one step"),
    Feature("enable_prefill_cp", _PREFILL_CP),
    above_one("attn_cp_size", _PREFILL_CP),
    Feature(
        "dllm_algorithm",
        "diffusion attends later tokens, and the backend attends earlier tokens only",
        in_use=_is_given,
    ),
    Feature("enable_mis", "it takes no masks between the items of a prompt"),
    Feature("enable_torch_compile", "its kernels have not been traced by torch.compile", devices=("cuda",)),
    Feature(
        "cuda_graph_config",
        "a graph of a whole prefill keeps the lengths of its capture; use breakable, the default",
        flag="--cuda-graph-backend-prefill full",
        in_use=_captures_whole_prefill,
        devices=("cuda",),
    ),
)

#: Arguments of speculative decoding that `kvpool_mla` does not support.
DRAFT_FEATURES = (
    Feature(
        "enable_deterministic_inference",
        "the queries of a verification share the splits of their list, which follow from the longest one",
    ),
    Feature("speculative_draft_window_size", "its draft backends attend whole sequences", in_use=_is_given),
    Feature("enable_multi_layer_eagle", "the pools of several draft models have not been examined"),
)

#: Features that do not work with a layout and decode context parallelism.
DCP_FEATURES = (
    Feature("enable_deterministic_inference", "results of ranks are merged in an order of the batch"),
    Feature(
        "hicache_storage_backend",
        "SGLang's other stores take the rows of all ranks for the same",
        in_use=lambda store: store not in (None, "file", "mooncake"),
        values="other than `file`, `mooncake`",
    ),
    Feature(
        "disaggregation_decode_enable_offload_kvcache",
        "SGLang makes its pages of the tokens of one rank, and a page of the pool has those of all",
    ),
    Feature("enable_two_batch_overlap", "the two have not been tested together"),
)

#: The same for models without sparse attention, and for models with it.
DENSE_DCP_FEATURES = (
    Feature(
        "speculative_algorithm",
        "pools of other drafts have not been tested there",
        in_use=lambda name: (name or "EAGLE").upper() not in ("EAGLE", "EAGLE3", "NEXTN"),
        values="other than `EAGLE`, `EAGLE3`, `NEXTN`",
    ),
    Feature("speculative_adaptive", "SGLang captures graphs of the target where it captures those of drafts"),
)
SPARSE_DCP_FEATURES = (
    Feature(
        "disaggregation_mode",
        "SGLang sends the index keys of such a server's pages to the addresses of others",
        in_use=disaggregates,
    ),
    Feature(
        "speculative_algorithm",
        "only a model's own MTP layer has been tested as its draft",
        in_use=lambda name: (name or "EAGLE").upper() not in ("EAGLE", "NEXTN"),
        values="other than `EAGLE`, `NEXTN`",
    ),
    Feature("enable_multi_layer_eagle", "the pools of several draft models have not been examined"),
    above_one("pp_size", "pipeline stages have not been tested there"),
    above_one("attn_dp_size", "groups of ranks with other requests have not been tested there"),
    Feature(
        "chunked_prefill_size",
        "buffers of a prefill are sized for a chunk, and a prompt may be longer",
        in_use=lambda size: size is not None and size <= 0,
        values="below 1",
    ),
)

#: Features that do not work with our readers of rows for sparse attention.
READER_FEATURES = (Feature("enable_torch_compile", "its kernels have not been traced"),)


def dense_dcp_obstacles(server: Server) -> Iterator[tuple[bool, str]]:
    """What several ranks do not serve of a model without sparse attention: whether it is so, and why."""
    view, hybrid = server.view, server.is_hybrid
    drafts = view.speculative_algorithm is not None
    on_blackwell = server.model_name == "KimiK3ForConditionalGeneration"
    yield on_blackwell, "SGLang attends its lists of several ranks with CuteDSL's kernel for Blackwell alone"
    moves = server.disaggregates or view.hicache_storage_backend is not None
    yield hybrid and moves, "moving its states to stores or servers has not been tested there"
    yield hybrid and drafts, "drafts beside its states have not been tested there"
    spread = view.pp_size > 1 or view.attn_dp_size > 1
    yield hybrid and spread, "stages and groups of ranks have not been tested there with states"
    single = view.mamba_radix_cache_strategy == "no_buffer" and not view.disable_radix_cache
    yield hybrid and single, "SGLang keeps states at pages of one token, and a page has tokens of all ranks"
    # Ranks divide the heads of a draft without MLA, which SGLang's transfers and stores take to be equal.
    yield drafts and moves and server.has_own_draft, "stores and transfers of its draft are untested there"
    stock = server.has_host_tier and not server.has_our_tier
    yield stock and drafts, "SGLang's host pool, without --kv-host-engine, divides a draft's rows among ranks"
    yield stock and hybrid, "SGLang's host pool, without --kv-host-engine, is untested there with states"
