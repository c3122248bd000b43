"""Checks of the arguments by themselves, whatever the model."""

import typing
from dataclasses import dataclass
from math import inf
from numbers import Integral, Real
from typing import Any

from sgl_kvpool.attention.readers import KVPOOL_BACKEND
from sgl_kvpool.layout import MLAKVCacheLayout
from sgl_kvpool.memory.arrangement import KVArrangement
from sgl_kvpool.refusal import Refusal, shown
from sgl_kvpool.sglang_plugin import options
from sgl_kvpool.sglang_plugin.registry import fields
from sgl_kvpool.sglang_plugin.rules import features
from sgl_kvpool.sglang_plugin.rules import host_tier as host_tier_rules
from sgl_kvpool.sglang_plugin.rules.features import (
    ARRANGEMENT_FEATURES,
    BACKEND_FIELDS,
    LAYOUT_FEATURES,
    flag_of,
)

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

    def problem(self, value: Any) -> str | None:
        """Why a value is not allowed; None if it is."""
        if value is None:
            return None
        if self.most is None:
            is_valid = _is_a(Integral, value) and self.least <= value <= _LARGEST_COUNT
            allowed = f"a whole number from {self.least} to {_LARGEST_COUNT}"
        else:
            is_valid = _is_a(Real, value) and 0 < value <= self.most and value < inf
            allowed = "a number above 0" + ("" if self.most == inf else f", at most {self.most:g}")
        if is_valid:
            return None
        given = f"{flag_of(self.field)} {shown(value)}"
        return f"{given} is not a valid {self.noun}; give {allowed}, or leave it out"


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

fields(*(number.field for number in (*NUMBERS, _TIER_SIZE, _TIER_RATIO)))
fields("kv_cache_dtype", "speculative_draft_attention_backend")


def check(server_args: Any) -> dict[options.Option, str]:
    """Values of all options, also from the environment; Refusal if they cannot work with any model.

    The fields of `server_args` hold the user's values.
    """
    if wrong := options.environment_problems():
        raise Refusal("; ".join(wrong))
    requested = {option: option.resolve(server_args) for option in options.OPTIONS}
    if requested[options.LAYOUT] == options.LAYOUT.default:
        _check_without_layout(requested, server_args)
        return requested
    layout = MLAKVCacheLayout(requested[options.LAYOUT])
    _check_types(server_args)
    check_features(layout, options.choose_arrangement(requested[options.ARRANGEMENT]), server_args)
    _check_dtype(layout, server_args.kv_cache_dtype)
    for number in NUMBERS:
        refuse_bad(number, server_args)
    check_page(server_args)
    if not host_tier_rules.has_host_tier(server_args):
        host_tier_rules.check_without_tier(requested, server_args)
    elif server_args.hicache_size:
        refuse_bad(_TIER_SIZE, server_args)
    else:
        refuse_bad(_TIER_RATIO, server_args)
    return requested


def check_features(layout: MLAKVCacheLayout, arrangement: KVArrangement, view: Any) -> None:
    """Refuse arguments that do not work with layout and arrangement; `view` has ServerArgs' fields."""
    remedy = "leave out one of the two"
    features.check_features(LAYOUT_FEATURES, view, f"{options.LAYOUT.flag} {layout}", remedy)
    if not arrangement.has_contiguous_layers:
        ours = f"{options.ARRANGEMENT.flag} {arrangement}"
        features.check_features(ARRANGEMENT_FEATURES, view, ours, remedy)


def _is_a(kind: type, value: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _check_types(server_args: Any) -> None:
    """Refuse numeric arguments that are not numbers; SGLang's parser converts them, its Engine does not."""
    from sglang.srt.arg_groups.arg_utils import record_fields

    numbers = {field.field: field for field in (*NUMBERS, _TIER_SIZE, _TIER_RATIO)}
    for field in record_fields(type(server_args)):
        hint = (*typing.get_args(field.type), field.type)[0]  # most are Annotated
        named = (hint, *typing.get_args(hint))  # types, or the values of a Literal
        kinds = {kind for kind in (int, float) if kind in named or kind in map(type, named)}
        value = getattr(server_args, field.name)
        if not kinds or value is None or _is_a(Real if float in kinds else Integral, value):
            continue
        if field.name in numbers:
            refuse_bad(numbers[field.name], server_args)
        kind = "a number" if float in kinds else "a whole number"
        raise Refusal(f"{flag_of(field.name)} {shown(value)} is not {kind}; give one, or leave it out")


def _check_dtype(layout: MLAKVCacheLayout, kv_cache_dtype: Any) -> None:
    """Refuse a `--kv-cache-dtype` that contradicts the layout; the error lists what each layout accepts."""
    if isinstance(kv_cache_dtype, str) and kv_cache_dtype in layout.accepted_kv_cache_dtypes:
        return
    table = "; ".join(
        f"{member}: {', '.join(member.accepted_kv_cache_dtypes)}" for member in MLAKVCacheLayout
    )
    raise Refusal(
        f"--kv-cache-dtype {shown(kv_cache_dtype)} contradicts {options.LAYOUT.flag} {layout}; leave it out, "
        f"or use what each layout accepts ({table})"
    )


def refuse_bad(number: Number, server_args: Any) -> None:
    if (problem := number.problem(getattr(server_args, number.field))) is not None:
        raise Refusal(problem)


def _check_without_layout(requested: dict[options.Option, str], server_args: Any) -> None:
    for option, value in requested.items():
        if value != option.default:
            raise Refusal(
                f"{option.flag} {value} (or {option.env}) applies to pools of sgl-kvpool, and a server "
                f"without a layout uses SGLang's pools; leave it out, or add {options.LAYOUT.flag} "
                f"{MLAKVCacheLayout.BF16}, which keeps SGLang's rows"
            )
    for field in (*BACKEND_FIELDS, "speculative_draft_attention_backend"):
        if getattr(server_args, field) == KVPOOL_BACKEND:
            raise Refusal(
                f"{flag_of(field)} {KVPOOL_BACKEND} reads pools of sgl-kvpool; add {options.LAYOUT.flag} "
                f"({', '.join(options.LAYOUT.values)})"
            )


def check_chunk(view: Any) -> None:
    """Refuse chunks of a prefill that are not whole pages, whose default size is ours with a host tier."""
    chunk, page = view.chunked_prefill_size, view.page_size
    if chunk > 0 and chunk % page and view.disaggregation_mode != "decode":
        whole = max(chunk // page, 1) * page * view.attn_dp_size  # SGLang has divided what was given
        raise Refusal(
            f"--chunked-prefill-size gives a rank {chunk} tokens, which are not whole pages of {page} "
            f"(--page-size); use --chunked-prefill-size {whole}"
        )


def check_page(view: Any) -> None:
    """Refuse a pool that is smaller than a page."""
    tokens, page_size = view.max_total_tokens, view.page_size
    if tokens is not None and page_size is not None and tokens < page_size:
        raise Refusal(
            f"--max-total-tokens {tokens} is less than a page, which has {page_size} tokens; give at least "
            "as many, a smaller --page-size, or leave it out"
        )
