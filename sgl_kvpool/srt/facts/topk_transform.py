"""Table of what DSA's indexer passes to attention: slots of the pool, or positions in gathered rows.

SGLang's sparse attention (DSA, formerly NSA) selects the top-k tokens of each query. The selection has one of
two forms:

* **PAGED**: slots of the pool, from which the attention kernel reads rows.
* **RAGGED**: positions in a tensor of keys, 16-bit or, for `flashmla_sparse_q8`, fp8. If no request has a
  prefix, these are the keys of the batch itself, otherwise all rows of its requests, gathered and converted
  before the kernel runs.

Metadata, indexer, forward pass and draft seeds must use the same form, and the kernel must be able to read
it. SGLang 0.5.23 decides from the dtype of the KV cache and the names of the two implementations, and only
for `EXTEND`. This table covers all modes and follows from what each kernel reads (cited at
`IMPLEMENTATIONS`). The module uses no state, no model and no SGLang.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any

from sgl_kvpool.layout import MLAKVCacheLayout
from sgl_kvpool.refusal import Refusal, Way, use_words, whole_number
from sgl_kvpool.srt.facts.readers import SGLANG_READERS, sglang_dsa_reads


class TopkTransform(Enum):
    """Form of a batch's top-k selection; names as in SGLang's `TopkTransformMethod`."""

    PAGED = "paged"
    RAGGED = "ragged"


class UnsupportedCombination(Refusal):
    """No top-k transform works: some kernel would read rows of this layout in the wrong format."""


#: SGLang's arguments of the two implementations.
FLAGS = ("--dsa-prefill-backend", "--dsa-decode-backend")
#: Name of our decode in this table. In SGLang's arguments it is called `SPARSE_BF16`, after the decode that
#: it replaces.
KVPOOL_DECODE = "kvpool_mla"
#: Names of SGLang's kernel over 16-bit keys, of its kernel over keys cast to fp8, and of its automatic
#: choice.
SPARSE_BF16, _SPARSE_Q8, _AUTO = "flashmla_sparse", "flashmla_sparse_q8", "flashmla_auto"

#: `ForwardMode` members in which the prefill implementation attends.
EXTEND_MODES = ("EXTEND", "MIXED", "SPLIT_PREFILL", "DLLM_EXTEND")
#: Modes in which the decode implementation attends: decode, and the modes that drafts add.
DECODE_MODES = ("DECODE", "TARGET_VERIFY", "DRAFT_EXTEND_V2")
#: Modes without attention; SGLang asks for a form in these modes too.
IDLE_MODES = ("IDLE", "PREBUILT")


@dataclass(frozen=True)
class _Implementation:
    """Requirements of an implementation of SGLang's sparse attention, or of our decode.

    `readers.SGLANG_READERS` lists the rows that it reads; in `ragged_modes` rows can be gathered for it.
    """

    ragged_modes: tuple[str, ...] = EXTEND_MODES
    prefill: bool = True
    decode: bool = True


#: Keys are SGLang's names. Line numbers refer to srt/layers/attention/dsa_backend.py in 0.5.23; they show why
#: `SGLANG_READERS` lists an implementation for a layout.
IMPLEMENTATIONS: dict[str, _Implementation] = {
    # :2805, a kernel over 16-bit keys. :2442 gathers scaled rows for it; our hook gathers rows that no kernel
    # of SGLang reads.
    SPARSE_BF16: _Implementation(),
    # :3011, casts keys to fp8 while it gathers them, whatever their stored format (:3164). Works in EXTEND
    # only: SGLang refuses it with mixed chunks (:466), and raises in the other modes (:2280).
    _SPARSE_Q8: _Implementation(ragged_modes=EXTEND_MODES[:1], decode=False),
    # :3309. In every call it first quantises all 16-bit rows of the layer (:3342).
    "flashmla_kv": _Implementation(),
    # :4039, a choice between flashmla_sparse and flashmla_kv. On Blackwell SGLang chooses per batch and then
    # uses the chosen name. On Hopper it is flashmla_kv for scaled rows and flashmla_sparse for 16-bit rows.
    # forward_decode has no such branch (:2600).
    _AUTO: _Implementation(decode=False),
    # :2737, treats the last dimension of rows as 16-bit values.
    "fa3": _Implementation(),
    # :3440; over raw fp8 rows SGLang requires it for both sides (arg_groups/overrides.py:571).
    "tilelang": _Implementation(),
    # :3801. If one side alone were trtllm over fp8 rows, SGLang would store raw rows for both
    # (kv_cache_configurator.py:3434), and its model would leave the rotary embedding to a kernel that is not
    # called (forward_mla.py:972).
    "trtllm": _Implementation(),
    # :3245, like flashmla_sparse; forward_decode has no such branch.
    "triton_sparse_mla": _Implementation(decode=False),
    # :3280, for SM120 and scaled rows only (flash_mla_sm120.py:694).
    "flashinfer_sparse_mla": _Implementation(),
    # attention/decode.py: decodes rows of every layout in registers.
    KVPOOL_DECODE: _Implementation(prefill=False),
}


def _reads_stored(name: str, layout: MLAKVCacheLayout) -> bool:
    """Whether an implementation reads rows in the pool (PAGED)."""
    return name == KVPOOL_DECODE or name in SGLANG_READERS[layout].dsa


def _reads_gathered(name: str, layout: MLAKVCacheLayout) -> bool:
    """Whether rows are gathered and decoded for an implementation in extends (RAGGED)."""
    if not sglang_dsa_reads(layout):
        return name == SPARSE_BF16  # our hook gathers rows for it
    return name in SGLANG_READERS[layout].dsa_gathered


#: SGLang's implementations that attend the recent tokens behind the last pooled index key
#: (dsa/dsa_backend_kpool.py:55). SGLang replaces flashmla_sparse by fa3, on Blackwell by trtllm; our hook
#: keeps it for rows that SGLang's kernels cannot read, which our decode attends in prefill too.
_KPOOL_READERS = ("fa3", "tilelang", "trtllm")


def select_topk_transform(
    layout: MLAKVCacheLayout | str,
    prefill_impl: str,
    decode_impl: str,
    forward_mode: Any,
    *,
    index_kpool: int = 1,
) -> TopkTransform:
    """Form that DSA's top-k selection must have for one batch.

    `layout`: Layout of the pool's rows.
    `prefill_impl`, `decode_impl`: SGLang's DSA implementations, or `kvpool_mla` for our decode. Both are
      needed on a disaggregated server too, because SGLang's model uses both in every role
      (forward_mla.py:972).
    `forward_mode`: Member or name of the mode. None, which SGLang passes outside of a batch, is a mode
      without attention.
    `index_kpool`: Tokens per index key. Above 1, SGLang's own rule applies to rows that its kernels read,
      because its kernels for such models differ; our decode reads the other rows in the pool, in prefill too.
    UnsupportedCombination: if one side cannot read the rows, the two sides do not work together, or the mode
      is not supported. The message names the reason and what to use instead: the nearest pair that works, or
      with pooled index keys (`index_kpool` above 1) layouts that work.
    ValueError: if a name is not a layout, implementation or mode, or `index_kpool` is below 1.
    """
    mode = getattr(forward_mode, "name", forward_mode)
    index_kpool = whole_number("index_kpool", index_kpool)
    return _select(MLAKVCacheLayout(layout), prefill_impl, decode_impl, mode, index_kpool)


@cache
def _select(
    layout: MLAKVCacheLayout, prefill: str, decode: str, mode: str | None, index_kpool: int
) -> TopkTransform:
    _check_names(prefill, decode, mode)
    if index_kpool > 1:
        if _is_kpool_pair_of_ours(layout, prefill, decode):
            return TopkTransform.PAGED
        if not sglang_dsa_reads(layout) or KVPOOL_DECODE in (prefill, decode):
            raise _kpool_unsupported(
                layout,
                f"KV cache layout {layout} with DSA decode {decode} does not work for models with pooled "
                "index keys (index_kpool above 1), whose recent tokens SGLang attends by fa3, tilelang or "
                "trtllm",
            )
        # SGLang's own rule, by which its q8 prefill gathers rows of every layout.
        ragged = mode == "EXTEND" and (prefill == _SPARSE_Q8 or _reads_gathered(prefill, layout))
        return TopkTransform.RAGGED if ragged else TopkTransform.PAGED
    if (problem := _problem(layout, prefill, decode)) is not None:
        raise UnsupportedCombination(problem, nearest_pair(layout, prefill, decode))
    if mode not in EXTEND_MODES or not _reads_gathered(prefill, layout):
        return TopkTransform.PAGED
    _check_ragged_modes(layout, prefill, decode, (mode,))
    return TopkTransform.RAGGED


#: Fields of ServerArgs that make SGLang form batches of a mode.
MODE_FIELDS = {
    "MIXED": "enable_mixed_chunk",
    "SPLIT_PREFILL": "enable_pdmux",
    "DLLM_EXTEND": "dllm_algorithm",
}


def check_combination(
    layout: MLAKVCacheLayout | str,
    prefill_impl: str,
    decode_impl: str,
    modes: tuple[str, ...] = (EXTEND_MODES[0], *DECODE_MODES),
    *,
    index_kpool: int = 1,
) -> None:
    """Refuse combinations that fail for some batch of a server; otherwise as `select_topk_transform`.

    With pooled index keys (`index_kpool` above 1) also those that SGLang would refuse at the first batch, or
    whose rows it would read wrongly.
    """
    for mode in modes:
        select_topk_transform(layout, prefill_impl, decode_impl, mode, index_kpool=index_kpool)
    layout = MLAKVCacheLayout(layout)
    if index_kpool > 1 and not _is_kpool_pair_of_ours(layout, prefill_impl, decode_impl):
        _check_kpool_readers(layout, prefill_impl, decode_impl, modes)


def check_pair(
    layout: MLAKVCacheLayout,
    prefill: str,
    decode: str,
    *,
    modes: tuple[str, ...] = (),
    index_kpool: int = 1,
    ranks: int = 1,
) -> None:
    """`check_combination` for SGLang's names of implementations; `modes` besides those of every server."""
    pair = table_names(prefill, decode, ours=is_ours(layout, ranks))
    check_combination(layout, *pair, (EXTEND_MODES[0], *DECODE_MODES, *modes), index_kpool=index_kpool)


def is_ours(layout: MLAKVCacheLayout, ranks: int) -> bool:
    """Whether our decode attends the rows: with `--dcp-size` all, since SGLang's kernels return no lse."""
    return ranks > 1 or not sglang_dsa_reads(layout)


def table_names(prefill: str, decode: str, *, ours: bool) -> tuple[str, str]:
    """This table's names for SGLang's pair; where our decode attends the rows (`ours`), it has SGLang's."""
    if ours and (prefill, decode) == (SPARSE_BF16, SPARSE_BF16):
        return prefill, KVPOOL_DECODE
    return prefill, decode


def working_pairs(layout: MLAKVCacheLayout) -> Iterator[tuple[str, str]]:
    """All pairs (prefill, decode) of implementations that work with a layout, in the order of the table."""
    for prefill in IMPLEMENTATIONS:
        for decode in IMPLEMENTATIONS:
            if _problem(layout, prefill, decode) is None:
                yield prefill, decode


def _check_ragged_modes(layout: MLAKVCacheLayout, prefill: str, decode: str, modes: tuple[str, ...]) -> None:
    """Refuse modes of extends in which rows cannot be gathered."""
    wired = IMPLEMENTATIONS[prefill].ragged_modes
    for mode in modes:
        if mode in EXTEND_MODES and mode not in wired:
            flag = "--" + MODE_FIELDS[mode].replace("_", "-")
            raise UnsupportedCombination(
                f"DSA prefill {prefill} gathers keys in {', '.join(wired)} batches only, and this one is "
                f"{mode}",
                Way(f"leave out the option that makes such batches ({flag})", (flag,)),
                nearest_pair(layout, prefill, decode),
            )


def _check_names(prefill: str, decode: str, mode: str | None) -> None:
    for side, name in (("prefill", prefill), ("decode", decode)):
        if name not in IMPLEMENTATIONS:
            raise ValueError(
                f"DSA {side} implementation {name!r} is unknown; name one of: {', '.join(IMPLEMENTATIONS)}"
            )
    known = (*EXTEND_MODES, *DECODE_MODES, *IDLE_MODES)
    if mode is not None and mode not in known:
        raise ValueError(f"forward mode {mode!r} is unknown; pass one of: {', '.join(known)}")


def _problem(layout: MLAKVCacheLayout, prefill: str, decode: str) -> str | None:
    """Reason why a pair does not work with a layout; None if it does."""
    for side, name in (("prefill", prefill), ("decode", decode)):
        implementation = IMPLEMENTATIONS[name]
        if not (implementation.prefill if side == "prefill" else implementation.decode):
            other = "decode" if side == "prefill" else "prefill"
            return f"DSA implementation {name} is for {other} only, and was named for {side}"
        gathered = side == "prefill" and _reads_gathered(name, layout)
        if not gathered and not _reads_stored(name, layout):
            return f"DSA {side} {name} cannot read rows of KV cache layout {layout}"
    if prefill != decode and prefill in SGLANG_READERS[layout].dsa_paired:
        return f"with rows of KV cache layout {layout}, {prefill} has to be both DSA prefill and decode"
    return None


#: Implementations that read `fp8` rows of models with pooled index keys on Hopper.
_KPOOL_FP8 = ("tilelang", "tilelang")


def _kpool_unsupported(layout: MLAKVCacheLayout, problem: str) -> UnsupportedCombination:
    """The error for a model with pooled index keys."""
    fp8 = MLAKVCacheLayout.FP8_NOPE_FP8_ROPE
    words = (f"--kv-cache-layout={fp8}", *_words(*_KPOOL_FP8))
    ways = [Way(use_words(*words).text, add=words[1:] if layout is fp8 else words)]
    for other in (MLAKVCacheLayout.FP4, MLAKVCacheLayout.BF16):
        ways.append(use_words(f"--kv-cache-layout={other}", without=FLAGS))
    return UnsupportedCombination(problem, *ways)


def _is_kpool_pair_of_ours(layout: MLAKVCacheLayout, prefill: str, decode: str) -> bool:
    return not sglang_dsa_reads(layout) and (prefill, decode) == (SPARSE_BF16, KVPOOL_DECODE)


def _check_kpool_readers(layout: MLAKVCacheLayout, prefill: str, decode: str, modes: tuple[str, ...]) -> None:
    """Refuse pairs that SGLang's `_check_kpool_tail_backend` would refuse, or that cannot read the rows."""
    for side, name in (("prefill", prefill), ("decode", decode)):
        if side == "prefill" and name == _SPARSE_Q8 and not layout.is_narrow:
            _check_ragged_modes(layout, name, decode, modes)
            continue
        # flashmla_sparse is replaced by fa3 on Hopper, by trtllm on Blackwell. Over 16-bit rows,
        # flashmla_auto is flashmla_sparse.
        sparse = name == SPARSE_BF16 or (side == "prefill" and name == _AUTO and not layout.is_narrow)
        reader = "fa3" if sparse else name
        if reader not in _KPOOL_READERS or not _reads_stored(reader, layout):
            attended = "" if reader == name else f" (attended by {reader} for such models)"
            raise _kpool_unsupported(
                layout,
                f"DSA {side} {name}{attended} cannot read rows of KV cache layout {layout} with pooled index "
                "keys (index_kpool above 1)",
            )
    if (problem := _problem(layout, prefill, decode)) is not None:
        raise _kpool_unsupported(layout, problem)


def _words(prefill: str, decode: str) -> tuple[str, ...]:
    return tuple(f"{flag}={name}" for flag, name in zip(FLAGS, (prefill, decode), strict=True))


def nearest_pair(layout: MLAKVCacheLayout, prefill: str, decode: str) -> Way:
    """The working pair nearest to the requested pair, by names that a user can pass."""
    if not sglang_dsa_reads(layout):
        return use_words(
            *_words(SPARSE_BF16, SPARSE_BF16),
            then=f", the default of this layout: {SPARSE_BF16} over decoded rows and, for decode, "
            f"{KVPOOL_DECODE}",
        )
    pairs = [
        pair
        for pair in working_pairs(layout)
        if KVPOOL_DECODE not in pair
        and IMPLEMENTATIONS[pair[0]].ragged_modes == EXTEND_MODES
        # SGLang accepts this kernel on SM120 only, and beside it only triton_sparse_mla as prefill
        # (flash_mla_sm120.py:706). This function does not know the GPU, so it proposes no mixed pair.
        and pair.count("flashinfer_sparse_mla") != 1
        and not SGLANG_READERS[layout].dsa_copied.intersection(pair)
    ]
    return use_words(*_words(*max(pairs, key=lambda pair: (pair[0] == prefill) + (pair[1] == decode))))
