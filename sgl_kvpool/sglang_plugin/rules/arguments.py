"""Checks of the arguments by themselves, before models and kernels are imported."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from sgl_kvpool.attention.readers import KVPOOL_BACKEND
from sgl_kvpool.layout import MLAKVCacheLayout
from sgl_kvpool.refusal import Refusal
from sgl_kvpool.sglang_plugin.options import (
    ARRANGEMENT,
    HOST_ENGINE,
    HOST_LAYOUT,
    HOST_SHARING,
    LAYOUT,
    OPTIONS,
    Option,
    choose_arrangement,
    environment_problems,
)
from sgl_kvpool.sglang_plugin.rules import host_tier as host_tier_rules
from sgl_kvpool.sglang_plugin.rules.features import BACKEND_FIELDS, flag_of
from sgl_kvpool.transfer.host_options import NODE, RANK, HostTierOptions

__all__ = ["NUMBERS", "Number", "check", "check_page"]


#: Upper limit that admits every number but infinity.
_LARGEST = sys.float_info.max


@dataclass(frozen=True)
class Number:
    """A numeric argument and its limits; the value None leaves the choice to SGLang.

    Attributes
    ----------
    field : str
        Field of SGLang's ServerArgs.
    noun : str
        What the number counts, for messages.
    least, most : float
        Smallest and largest allowed value.
    is_positive : bool
        Whether `least` itself is too small.
    """

    field: str
    noun: str
    least: float = 1
    most: float = _LARGEST
    is_positive: bool = False

    @property
    def flag(self) -> str:
        """The field's flag on the command line."""
        return flag_of(self.field)

    def problem(self, value: Any) -> str | None:
        """Why a value is not allowed; None if it is."""
        if not isinstance(value, int | float):
            return None
        above = value > self.least if self.is_positive else value >= self.least
        if above and value <= self.most:
            return None
        allowed = f"one above {self.least:g}" if self.is_positive else f"{self.least:g} or more"
        limit = "" if self.most == _LARGEST else f", at most {self.most:g}"
        return f"{self.flag} {value} is not a valid {self.noun}; give {allowed}{limit}, or leave it out"


#: Numbers checked with a layout. SGLang accepts any value, and most bad ones end as "Not enough memory" when
#: the model is loaded.
NUMBERS = (
    Number("max_total_tokens", "number of tokens"),
    Number("page_size", "number of tokens"),
    Number("context_length", "number of tokens"),
    Number("max_running_requests", "number of requests"),
    Number("mem_fraction_static", "share of the memory", least=0, most=1, is_positive=True),
    *(Number(f"{kind}_size", "number of ranks") for kind in ("tp", "pp", "dp")),
    Number("speculative_num_draft_tokens", "number of tokens"),
    Number("max_mamba_cache_size", "number of states"),
    Number("mamba_full_memory_ratio", "ratio of memory", least=0, is_positive=True),
)
#: Numbers of a host tier; the ratio does not matter if a size is given.
_TIER_SIZE = Number("hicache_size", "number of GB", least=0)
_TIER_RATIO = Number(
    "hicache_ratio", "number of host tokens per token of the pool", least=0, is_positive=True
)


def check(server_args: Any) -> dict[Option, str]:
    """Options that a `ServerArgs` requests; Refusal if they cannot work with any model.

    Parameters
    ----------
    server_args : ServerArgs
        Its fields hold the user's values.

    Returns
    -------
    dict of Option to str
        Values of all options, including those from the environment.
    """
    wrong = environment_problems()
    if wrong:
        raise Refusal("; ".join(wrong))
    requested = {option: option.requested(server_args) for option in OPTIONS}
    if requested[LAYOUT] == LAYOUT.default:
        _check_without_layout(requested, server_args)
        return requested
    layout = MLAKVCacheLayout.parse(requested[LAYOUT])
    host_tier_rules.check_features(layout, choose_arrangement(requested[ARRANGEMENT]), server_args)
    dtype = server_args.kv_cache_dtype
    if dtype not in layout.accepted_kv_cache_dtypes(is_dsa=True):  # the accepted dtypes depend on the model
        host_tier_rules.check_dtype(layout, dtype, is_dsa=False)
    for number in NUMBERS:
        _refuse_bad(number, server_args)
    check_page(server_args)
    if not host_tier_rules.has_host_tier(server_args):
        sharing = NODE if requested[HOST_SHARING] == NODE else RANK
        host_tier_rules.check_without_tier(
            HostTierOptions(requested[HOST_LAYOUT], requested[HOST_ENGINE], sharing), server_args
        )
    elif server_args.hicache_size:
        _refuse_bad(_TIER_SIZE, server_args)
    else:
        _refuse_bad(_TIER_RATIO, server_args)
    return requested


def _refuse_bad(number: Number, server_args: Any) -> None:
    problem = number.problem(getattr(server_args, number.field))
    if problem is not None:
        raise Refusal(problem)


def _check_without_layout(requested: dict[Option, str], server_args: Any) -> None:
    for option, value in requested.items():
        if value != option.default:
            raise Refusal(
                f"{option.flag} {value} (or {option.env}) applies to pools of sgl-kvpool, and a server "
                f"without a layout uses SGLang's pools; leave it out, or add {LAYOUT.flag} "
                f"{MLAKVCacheLayout.BF16}, which keeps SGLang's rows"
            )
    for field in (*BACKEND_FIELDS, "speculative_draft_attention_backend"):
        if getattr(server_args, field) == KVPOOL_BACKEND:
            raise Refusal(
                f"{flag_of(field)} {KVPOOL_BACKEND} reads pools of sgl-kvpool; add {LAYOUT.flag} "
                f"({', '.join(LAYOUT.values)})"
            )


def check_page(view: Any) -> None:
    """Refuse a pool that is smaller than a page."""
    tokens, page_size = view.max_total_tokens, view.page_size
    if tokens is not None and page_size is not None and tokens < page_size:
        raise Refusal(
            f"--max-total-tokens {tokens} is less than a page, which has {page_size} tokens; give at least "
            "as many, a smaller --page-size, or leave it out"
        )
