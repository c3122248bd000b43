"""Which numbers DSA's indexer hands to attention: slots of the pool, or places in gathered rows. A table.

SGLang's sparse attention (DSA, formerly NSA) selects the top-k tokens of each query and then either

* **PAGED** translates them into slots of the pool, from which the attention kernel reads rows, or
* **RAGGED** leaves them places in one tensor of 16-bit keys: those of the batch itself if no request has a
  prefix, else all rows of its requests, gathered and decoded before the kernel.

Metadata, indexer, forward pass and the seeds of drafts have to agree, and a kernel must be able to read what
it is then given. SGLang 0.5.23 decides by a dtype and two names, for `EXTEND` alone; this is the whole
table, from what each kernel reads (`docs/sparse.md` cites the lines). Pure: no state, no model, no SGLang.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any

from sgl_kvpool.layout import MLAKVCacheLayout
from sgl_kvpool.refusal import Refusal
from sgl_kvpool.sizes import whole_number

__all__ = [
    "DECODE_MODES",
    "EXTEND_MODES",
    "IDLE_MODES",
    "IMPLEMENTATIONS",
    "KVPOOL_DECODE",
    "SPARSE_BF16",
    "TopkTransform",
    "UnsupportedCombination",
    "check_combination",
    "nearest_pair",
    "select_topk_transform",
    "working_pairs",
]


class TopkTransform(Enum):
    """What the top-k selection of a batch is turned into; names as in SGLang's `TopkTransformMethod`."""

    PAGED = "paged"
    RAGGED = "ragged"


class UnsupportedCombination(Refusal):
    """Layout, implementations and mode of which a kernel would be handed what it cannot read.

    Attributes
    ----------
    instead : tuple of str or None
        Implementations (prefill, decode) to name instead, if naming others helps.
    """

    def __init__(self, text: str, instead: tuple[str, str] | None = None) -> None:
        super().__init__(text)
        self.instead = instead


#: Our own decode, by the name it has in this table. SGLang knows it as `SPARSE_BF16`, which it stands in for.
KVPOOL_DECODE = "kvpool_mla"
#: SGLang's kernel over 16-bit keys.
SPARSE_BF16 = "flashmla_sparse"

#: `ForwardMode` members in which the prefill implementation attends.
EXTEND_MODES = ("EXTEND", "MIXED", "SPLIT_PREFILL", "DLLM_EXTEND")
#: Those in which the decode implementation does: decoding, and what drafts add to it.
DECODE_MODES = ("DECODE", "TARGET_VERIFY", "DRAFT_EXTEND_V2")
#: Those in which nothing is attended; SGLang asks all the same.
IDLE_MODES = ("IDLE", "PREBUILT")


@dataclass(frozen=True)
class _Implementation:
    """What one of SGLang's `--dsa-prefill-backend` and `--dsa-decode-backend` needs, or our own.

    Attributes
    ----------
    stored : frozenset of MLAKVCacheLayout
        Rows that it reads where they are stored: PAGED.
    gathered : frozenset of MLAKVCacheLayout
        Rows that are gathered and decoded before it, in extends: RAGGED.
    ragged_modes : tuple of str
        In which gathering is wired up.
    copied : frozenset of MLAKVCacheLayout
        Of those stored, rows that it encodes anew before it reads them: a whole pool of them, in every call.
    prefill, decode : bool
        Whether there is such a prefill, such a decode.
    alone : frozenset of MLAKVCacheLayout
        Rows with which, as a prefill, it has to be the decode too.
    """

    stored: frozenset[MLAKVCacheLayout] = frozenset()
    gathered: frozenset[MLAKVCacheLayout] = frozenset()
    ragged_modes: tuple[str, ...] = EXTEND_MODES
    copied: frozenset[MLAKVCacheLayout] = frozenset()
    prefill: bool = True
    decode: bool = True
    alone: frozenset[MLAKVCacheLayout] = frozenset()


_BF16 = MLAKVCacheLayout.BF16
_RAW = MLAKVCacheLayout.FP8_NOPE_FP8_ROPE
_SCALED = MLAKVCacheLayout.FP8_NOPE_WITH_BLOCK_SCALE_BF16_ROPE
_FP4 = MLAKVCacheLayout.FP4


def _of(*layouts: MLAKVCacheLayout) -> frozenset[MLAKVCacheLayout]:
    return frozenset(layouts)


#: By SGLang's names. Lines are of srt/layers/attention/dsa_backend.py in 0.5.23.
IMPLEMENTATIONS: dict[str, _Implementation] = {
    # :2805, a kernel over 16-bit keys. :2442 gathers scaled rows for it; for fp4 our hook does.
    SPARSE_BF16: _Implementation(stored=_of(_BF16), gathered=_of(_SCALED, _FP4)),
    # :3011, casts keys to fp8 as it gathers them, whatever they are stored as (:3164). Only EXTEND gets
    # there: SGLang refuses it with mixed chunks (:466), and raises in the other modes (:2280).
    "flashmla_sparse_q8": _Implementation(
        gathered=_of(_BF16, _SCALED), ragged_modes=EXTEND_MODES[:1], decode=False
    ),
    # :3309. 16-bit rows are quantised before, a whole layer's in every call (:3342).
    "flashmla_kv": _Implementation(stored=_of(_BF16, _SCALED), copied=_of(_BF16)),
    # :4039, a choice between the two above, made per batch on Blackwell, where SGLang asks with the chosen
    # name. On Hopper flashmla_kv for scaled rows and flashmla_sparse for 16-bit ones. forward_decode has no
    # such branch (:2600).
    "flashmla_auto": _Implementation(stored=_of(_BF16, _SCALED), decode=False),
    # :2737, takes the last dimension of rows for 16-bit values.
    "fa3": _Implementation(stored=_of(_BF16)),
    # :3440; arg_groups/overrides.py:571 wants raw fp8 rows to have no other reader.
    "tilelang": _Implementation(stored=_of(_BF16, _RAW), alone=_of(_RAW)),
    # :3801; one side alone would make SGLang store raw rows for both (kv_cache_configurator.py:3434), and its
    # model leave the rotary embedding to a kernel that is not called (forward_mla.py:972).
    "trtllm": _Implementation(stored=_of(_BF16, _RAW), alone=_of(_RAW)),
    # :3245, as flashmla_sparse; forward_decode has no such branch.
    "triton_sparse_mla": _Implementation(stored=_of(_BF16), gathered=_of(_SCALED), decode=False),
    # :3280, SM120 and scaled rows alone (flash_mla_sm120.py:694).
    "flashinfer_sparse_mla": _Implementation(stored=_of(_SCALED)),
    # attention/decode.py: decodes in registers whatever is stored.
    KVPOOL_DECODE: _Implementation(stored=_of(*MLAKVCacheLayout), prefill=False),
}

#: Prefills over pools of pooled index keys for which SGLang selects RAGGED in EXTEND.
_KPOOL_RAGGED = {SPARSE_BF16: _of(_SCALED), "triton_sparse_mla": _of(_SCALED)}
_KPOOL_RAGGED["flashmla_sparse_q8"] = _of(*MLAKVCacheLayout)
#: What kpool's tail of recent tokens is attended by (dsa/dsa_backend_kpool.py:55); flashmla_sparse is
#: replaced by the first of them, or on Blackwell by the last.
_KPOOL_READERS = ("fa3", "tilelang", "trtllm")


def select_topk_transform(
    layout: MLAKVCacheLayout | str,
    prefill_impl: str,
    decode_impl: str,
    forward_mode: Any,
    *,
    index_kpool: int = 1,
) -> TopkTransform:
    """What DSA's top-k selection has to be turned into for one batch.

    Parameters
    ----------
    layout : MLAKVCacheLayout or str
        Of the pool's rows.
    prefill_impl, decode_impl : str
        SGLang's DSA implementations, or `kvpool_mla` for our decode. Both, on a disaggregated server too:
        SGLang's model looks at both, whatever the role (forward_mla.py:972).
    forward_mode : ForwardMode, str or None
        Member or name of the mode. None, as SGLang asks outside of a batch, is a mode that attends nothing.
    index_kpool : int
        Tokens per index key. Above 1 SGLang's own rule is kept: its kernels for such models are others.

    Returns
    -------
    TopkTransform

    Raises
    ------
    UnsupportedCombination
        One side cannot read the rows, the two do not go together, or the mode is not wired up. Says which,
        and names the nearest pair that works.
    ValueError
        A name that is no layout, implementation or mode, or an `index_kpool` below 1.
    """
    mode = getattr(forward_mode, "name", forward_mode)
    index_kpool = whole_number("index_kpool", index_kpool)
    return _select(MLAKVCacheLayout.parse(layout), prefill_impl, decode_impl, mode, index_kpool)


@cache
def _select(
    layout: MLAKVCacheLayout, prefill: str, decode: str, mode: str | None, index_kpool: int
) -> TopkTransform:
    _check_names(prefill, decode, mode)
    if index_kpool > 1:
        _check_kpool_layout(layout, prefill, decode)
        ragged = mode == "EXTEND" and layout in _KPOOL_RAGGED.get(prefill, ())
        return TopkTransform.RAGGED if ragged else TopkTransform.PAGED
    problem = _problem(layout, prefill, decode)
    if problem is not None:
        raise UnsupportedCombination(
            f"{problem}; {nearest_pair(layout, prefill, decode)}", _nearest(layout, prefill, decode)
        )
    if mode not in EXTEND_MODES or layout not in IMPLEMENTATIONS[prefill].gathered:
        return TopkTransform.PAGED
    _check_ragged_modes(layout, prefill, decode, (mode,))
    return TopkTransform.RAGGED


#: What makes SGLang form batches of a mode.
_MAKERS = {
    "MIXED": "--enable-mixed-chunk",
    "SPLIT_PREFILL": "--enable-pdmux",
    "DLLM_EXTEND": "--dllm-algorithm",
}


def check_combination(
    layout: MLAKVCacheLayout | str,
    prefill_impl: str,
    decode_impl: str,
    modes: tuple[str, ...] = (EXTEND_MODES[0], *DECODE_MODES),
    *,
    index_kpool: int = 1,
) -> None:
    """Refuse what some batch of a server would fail with; arguments as of `select_topk_transform`.

    Parameters
    ----------
    modes : tuple of str
        Those that the server forms batches of.

    Raises
    ------
    UnsupportedCombination, ValueError
        As `select_topk_transform`; with pooled index keys also for what SGLang itself refuses at the first
        batch, or reads wrongly.
    """
    for mode in modes:
        select_topk_transform(layout, prefill_impl, decode_impl, mode, index_kpool=index_kpool)
    if index_kpool > 1:
        _check_kpool_readers(MLAKVCacheLayout.parse(layout), prefill_impl, decode_impl, modes)


def working_pairs(layout: MLAKVCacheLayout) -> Iterator[tuple[str, str]]:
    """Every (prefill, decode) of implementations that works with a layout, in the order of the table."""
    for prefill in IMPLEMENTATIONS:
        for decode in IMPLEMENTATIONS:
            if _problem(layout, prefill, decode) is None:
                yield prefill, decode


# -------------------------------------------------------------------- what does not work


def _check_ragged_modes(layout: MLAKVCacheLayout, prefill: str, decode: str, modes: tuple[str, ...]) -> None:
    """Refuse modes of extends in which gathering is not wired up."""
    wired = IMPLEMENTATIONS[prefill].ragged_modes
    for mode in modes:
        if mode in EXTEND_MODES and mode not in wired:
            raise UnsupportedCombination(
                f"DSA prefill {prefill} gathers keys in {', '.join(wired)} batches only, and this one is "
                f"{mode}; leave out what makes such batches ({_MAKERS[mode]}), or "
                f"{nearest_pair(layout, prefill, decode)}"
            )


def _check_names(prefill: str, decode: str, mode: str | None) -> None:
    for side, name in (("prefill", prefill), ("decode", decode)):
        if name not in IMPLEMENTATIONS:
            raise ValueError(
                f"DSA {side} implementation {name!r} is not in the table; those that are: "
                f"{', '.join(IMPLEMENTATIONS)}"
            )
    known = (*EXTEND_MODES, *DECODE_MODES, *IDLE_MODES)
    if mode is not None and mode not in known:
        raise ValueError(f"forward mode {mode!r} is not in the table; those that are: {', '.join(known)}")


def _problem(layout: MLAKVCacheLayout, prefill: str, decode: str) -> str | None:
    """Why a pair does not work with a layout; None if it does."""
    for side, name in (("prefill", prefill), ("decode", decode)):
        implementation = IMPLEMENTATIONS[name]
        if not (implementation.prefill if side == "prefill" else implementation.decode):
            other = "decode" if side == "prefill" else "prefill"
            return f"DSA implementation {name} is a {other} and was given as {side}"
        readable = implementation.stored
        if side == "prefill":
            readable |= implementation.gathered
        if layout not in readable:
            return f"DSA {side} {name} cannot read rows of KV cache layout {layout}"
    if prefill != decode and layout in IMPLEMENTATIONS[prefill].alone:
        return f"with rows of KV cache layout {layout}, {prefill} has to be both DSA prefill and decode"
    return None


def _check_kpool_layout(layout: MLAKVCacheLayout, prefill: str, decode: str) -> None:
    if layout is _FP4 or KVPOOL_DECODE in (prefill, decode):
        raise UnsupportedCombination(
            f"KV cache layout {layout} with DSA decode {decode} does not work for models with pooled index "
            "keys (index_kpool above 1): SGLang attends their tail by fa3, tilelang or trtllm; use "
            f"--kv-cache-layout {_BF16}"
        )


def _check_kpool_readers(layout: MLAKVCacheLayout, prefill: str, decode: str, modes: tuple[str, ...]) -> None:
    """What `_check_kpool_tail_backend` of SGLang raises at the first batch, and readers of other rows."""
    for side, name in (("prefill", prefill), ("decode", decode)):
        if side == "prefill" and name == "flashmla_sparse_q8" and layout is _BF16:
            _check_ragged_modes(layout, name, decode, modes)
            continue
        # On Hopper; on Blackwell by trtllm. With 16-bit rows flashmla_auto is flashmla_sparse.
        sparse = name == SPARSE_BF16 or (side == "prefill" and name == "flashmla_auto" and layout is _BF16)
        reader = "fa3" if sparse else name
        if reader not in _KPOOL_READERS or layout not in IMPLEMENTATIONS[reader].stored:
            attended = "" if reader == name else f" (attended by {reader} for such models)"
            raise UnsupportedCombination(
                f"DSA {side} {name}{attended} cannot read rows of KV cache layout {layout} with pooled index "
                f"keys (index_kpool above 1); use --kv-cache-layout {_BF16} and leave out "
                "--dsa-prefill-backend and --dsa-decode-backend"
            )
    problem = _problem(layout, prefill, decode) if layout is _RAW else None
    if problem is not None:
        raise UnsupportedCombination(f"{problem}; use --kv-cache-layout {_BF16}")


def nearest_pair(layout: MLAKVCacheLayout, prefill: str, decode: str) -> str:
    """What to use instead, in words: of the pairs that a user can name, the nearest to what was asked for."""
    if layout is _FP4:
        return (
            f"use --dsa-prefill-backend {SPARSE_BF16} --dsa-decode-backend {SPARSE_BF16}, its default, which "
            f"stands for {SPARSE_BF16} over decoded rows and {KVPOOL_DECODE}"
        )
    best = _nearest(layout, prefill, decode)
    return f"use --dsa-prefill-backend {best[0]} --dsa-decode-backend {best[1]}"


def _nearest(layout: MLAKVCacheLayout, prefill: str, decode: str) -> tuple[str, str]:
    """By the names that SGLang takes."""
    if layout is _FP4:
        return SPARSE_BF16, SPARSE_BF16
    pairs = [
        pair
        for pair in working_pairs(layout)
        if KVPOOL_DECODE not in pair
        and IMPLEMENTATIONS[pair[0]].ragged_modes == EXTEND_MODES
        # SM120, where SGLang takes it for both sides or not at all (flash_mla_sm120.py:706).
        and pair.count("flashinfer_sparse_mla") != 1
        and not any(layout in IMPLEMENTATIONS[name].copied for name in pair)
    ]
    return max(pairs, key=lambda pair: (pair[0] == prefill) + (pair[1] == decode))
