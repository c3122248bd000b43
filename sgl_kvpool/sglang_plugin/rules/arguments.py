"""Checks of the arguments by themselves, whatever the model."""

import typing
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from numbers import Integral, Real
from typing import Any

from sgl_kvpool.layout import MLAKVCacheLayout
from sgl_kvpool.refusal import Refusal, Way, leave_out, shown, use_words
from sgl_kvpool.sglang_plugin import options
from sgl_kvpool.sglang_plugin.registry import fields
from sgl_kvpool.sglang_plugin.rules import features
from sgl_kvpool.sglang_plugin.rules.features import BACKEND_FIELDS, flag_of
from sgl_kvpool.sglang_plugin.rules.host_tier import check_without_tier
from sgl_kvpool.sglang_plugin.server import Server
from sgl_kvpool.srt.facts.readers import KVPOOL_BACKEND

#: Largest count; SGLang and the kernels keep tokens and slots in 32 bits.
_LARGEST_COUNT = (1 << 31) - 1


@dataclass(frozen=True)
class Number:
    """A numeric argument (a field of ServerArgs) and its limits; the value None leaves the choice to SGLang.

    `noun` is what the number counts, for messages.
    """

    field: str
    noun: str
    #: Smallest allowed value of a whole number.
    least: int = 1
    #: Upper limit of a number above 0, whole or not; infinity, which is not allowed itself, is no limit.
    most: float | None = None

    def check(self, view: Any) -> None:
        """Refuse a value that is not allowed; `view` has the fields of ServerArgs."""
        value, flag = getattr(view, self.field), flag_of(self.field)
        if value is None:
            return
        if self.most is None:
            is_valid = _is_a(Integral, value) and self.least <= value <= _LARGEST_COUNT
            allowed = f"a whole number from {self.least} to {_LARGEST_COUNT}"
        else:
            is_valid = _is_a(Real, value) and 0 < value <= self.most and value < inf
            allowed = "a number above 0" + ("" if self.most == inf else f", at most {self.most:g}")
        if not is_valid:
            way = Way(f"give {allowed}", add=(f"{flag}={max(self.least, 1) if self.most is None else 1}",))
            raise Refusal(f"{flag} {shown(value)} is not a valid {self.noun}", way, leave_out(flag))


#: Numbers checked with a layout. SGLang accepts any value, and most bad ones end as "Not enough memory" when
#: the model is loaded.
NUMBERS = (
    Number("max_total_tokens", "number of tokens"),
    Number("page_size", "number of tokens"),
    Number("context_length", "number of tokens"),
    Number("max_running_requests", "number of requests"),
    Number("mem_fraction_static", "share of the memory", most=1),
    *(Number(f"{kind}_size", "number of ranks") for kind in ("tp", "pp", "dp", "attn_dp", "attn_cp", "ep")),
    Number("speculative_num_draft_tokens", "number of tokens"),
    Number("max_mamba_cache_size", "number of states"),
    Number("mamba_full_memory_ratio", "ratio of memory", most=inf),
)
#: Numbers of a host tier; the ratio does not matter if a size is given.
_TIER_SIZE = Number("hicache_size", "number of GB", least=0)
_TIER_RATIO = Number("hicache_ratio", "number of host tokens per token of the pool", most=inf)

fields("kv_canary", *(number.field for number in (*NUMBERS, _TIER_SIZE, _TIER_RATIO)))


def check(server_args: Any) -> options.KVPoolConfig:
    """The record of a server with the values of all options; Refusal if no model works with its arguments.

    The fields of `server_args` hold the user's values.
    """
    if wrong := options.environment_problems():
        raise Refusal("; ".join(wrong))
    config = options.decided(server_args)
    server = Server(server_args, config=config, view=server_args)
    for rule in RULES_OF_STOCK if config.layout is None else RULES:
        rule(server)
    return config


def _is_a(kind: type, value: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def check_types(server: Server) -> None:
    """Refuse numeric arguments that are not numbers; SGLang's parser converts them, its Engine does not."""
    from sglang.srt.arg_groups.arg_utils import record_fields

    server_args = server.server_args
    numbers = {field.field: field for field in (*NUMBERS, _TIER_SIZE, _TIER_RATIO)}
    for field in record_fields(type(server_args)):
        hint = (*typing.get_args(field.type), field.type)[0]  # most are Annotated
        named = (hint, *typing.get_args(hint))  # types, or the values of a Literal
        kinds = {kind for kind in (int, float) if kind in named or kind in map(type, named)}
        value = getattr(server_args, field.name)
        if not kinds or value is None or _is_a(Real if float in kinds else Integral, value):
            continue
        if field.name in numbers:
            numbers[field.name].check(server_args)
        kind = "a number" if float in kinds else "a whole number"
        flag = flag_of(field.name)
        raise Refusal(f"{flag} {shown(value)} is not {kind}", "give one", leave_out(flag))


def check_dtype(server: Server) -> None:
    """Refuse a `--kv-cache-dtype` that contradicts the layout; the error lists what each layout accepts."""
    layout, kv_cache_dtype = server.layout, server.view.kv_cache_dtype
    if isinstance(kv_cache_dtype, str) and kv_cache_dtype in layout.accepted_kv_cache_dtypes:
        return
    table = "; ".join(
        f"{member}: {', '.join(member.accepted_kv_cache_dtypes)}" for member in MLAKVCacheLayout
    )
    raise Refusal(
        f"--kv-cache-dtype {shown(kv_cache_dtype)} contradicts {options.LAYOUT.flag} {layout}",
        *(leave_out("--kv-cache-dtype"), f"use what each layout accepts ({table})"),
    )


def check_numbers(server: Server) -> None:
    for number in NUMBERS:
        number.check(server.view)


def check_tier(server: Server) -> None:
    """Refuse a size of the host tier that is out of its limits."""
    if server.has_host_tier:
        (_TIER_SIZE if server.view.hicache_size else _TIER_RATIO).check(server.view)


def check_error_sample(server: Server) -> None:
    """Refuse samples that no metrics would show."""
    option = options.ERROR_SAMPLE
    if (every := server.config.requests(option)) != option.default and not server.view.enable_metrics:
        raise Refusal(
            f"{option.flag} {every} (or {option.env}) does nothing without --enable-metrics",
            *(Way("add that", add=("--enable-metrics",)), leave_out(option.flag)),
        )


def check_canary(server: Server) -> None:
    """Refuse SGLang's canary on CPUs, and where rows move and its hashes, which it keeps by slot, stay."""
    view = server.view
    is_tree = (view.speculative_eagle_topk or 1) > 1 or view.speculative_algorithm == "NGRAM"
    moves = server.has_host_tier or server.disaggregates or view.dcp_size > 1 or is_tree
    if (moves or view.device == "cpu") and (mode := view.kv_canary) != "none":
        raise Refusal(
            f"--kv-canary {mode} does not work with {options.LAYOUT.flag} on a CPU, for SGLang's kernels, or "
            "with a host tier, disaggregation, --dcp-size or trees of drafts: rows move, and the hashes of "
            "their slots do not",
            leave_out("--kv-canary"),
        )


def check_without_layout(server: Server) -> None:
    """Refuse options and backends that need a layout."""
    plain = f"{options.LAYOUT.flag} {MLAKVCacheLayout.BF16}"
    for option in options.OPTIONS:
        value = server.config.requests(option)
        if value != option.default:
            raise Refusal(
                f"{option.flag} {value} (or {option.env}) applies to pools of sgl-kvpool, and a server "
                "without a layout uses SGLang's pools",
                leave_out(option.flag),
                Way(f"add {plain}, which keeps SGLang's rows", add=(plain.replace(" ", "="),)),
            )
    add = options.LAYOUT.flag
    text = f"add {add} ({', '.join(options.LAYOUT.values)})"
    for field in (*BACKEND_FIELDS, "speculative_draft_attention_backend"):
        if getattr(server.view, field) == KVPOOL_BACKEND:
            raise Refusal(
                f"{flag_of(field)} {KVPOOL_BACKEND} reads pools of sgl-kvpool",
                *(Way(text, add=(f"{add}={layout}",)) for layout in options.LAYOUT.values),
            )


def check_chunk(server: Server) -> None:
    """Refuse chunks of a prefill that are not whole pages, whose default size is ours with a host tier."""
    view = server.view
    chunk, page = view.chunked_prefill_size, view.page_size
    if chunk > 0 and chunk % page and view.disaggregation_mode != "decode":
        whole = max(chunk // page, 1) * page * view.attn_dp_size  # SGLang has divided what was given
        raise Refusal(
            f"--chunked-prefill-size gives a rank {chunk} tokens, which are not whole pages of {page} "
            "(--page-size)",
            use_words(f"--chunked-prefill-size={whole}"),
        )


def check_page(server: Server) -> None:
    """Refuse a pool that is smaller than a page."""
    tokens, page_size = server.view.max_total_tokens, server.view.page_size
    if tokens is not None and page_size is not None and tokens < page_size:
        raise Refusal(
            f"--max-total-tokens {tokens} is less than a page, which has {page_size} tokens",
            Way("give at least as many, a smaller --page-size", add=(f"--max-total-tokens={page_size}",)),
            leave_out("--max-total-tokens"),
        )


#: Rules of the arguments alone, in their order: of servers with a layout, and of others.
RULES: tuple[Callable[[Server], None], ...] = (
    check_types,
    features.check,
    check_dtype,
    check_numbers,
    check_page,
    check_tier,
    check_without_tier,
    check_error_sample,
    check_canary,
)
RULES_OF_STOCK = (check_without_layout,)
