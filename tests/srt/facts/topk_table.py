"""The oracle of `topk_transform`: what DSA's implementations can be given, written out by hand.

Nothing here is taken from the code under test but the names of layouts; the lines of SGLang that it follows
from are cited at `topk_transform.IMPLEMENTATIONS`.
"""

import itertools

from sgl_kvpool import MLAKVCacheLayout

#: Layouts whose rows no kernel of SGLang reads have the lines of `fp4`.
LIKE = {"fp4_fp8_rope": "fp4"}
LAYOUTS = ("bf16", "fp8", "fp8_block_scale", "fp4", *LIKE)
if set(LAYOUTS) != {layout.value for layout in MLAKVCacheLayout}:
    raise RuntimeError(f"{__file__} has lines for {LAYOUTS}; add others to them or to LIKE")
IMPLEMENTATIONS = (
    *("flashmla_sparse", "flashmla_sparse_q8", "flashmla_kv", "flashmla_auto", "fa3", "tilelang", "trtllm"),
    *("triton_sparse_mla", "flashinfer_sparse_mla", "kvpool_mla"),
)
#: Modes in which the prefill implementation attends; the decode implementation, or none, does in the others.
EXTENDS = ("EXTEND", "MIXED", "SPLIT_PREFILL", "DLLM_EXTEND")
MODES = (*EXTENDS, "DECODE", "IDLE", "TARGET_VERIFY", "DRAFT_EXTEND_V2", "PREBUILT")

#: By implementation: a prefill that reads the rows in the pool (P), that has them gathered (R), or only in
#: EXTEND (E); a decode (D) that reads them in the pool.
PREFILLS = {
    "bf16": "PEPPPPPP--",
    "fp8": "-----PP---",
    "fp8_block_scale": "REPP---RP-",
    "fp4": "R---------",
}
DECODES = {
    "bf16": "D-D-DDD--D",
    "fp8": "-----DD--D",
    "fp8_block_scale": "--D-----DD",
    "fp4": "---------D",
}
#: SGLang requires one reader for both sides of `fp8` rows.
FP8_PAIRS = {("tilelang", "tilelang"), ("trtllm", "trtllm")}

PAGED, RAGGED, REFUSED = "PAGED", "RAGGED", "REFUSED"


def lines(text):
    """Words of every line."""
    return [line.split() for line in text.splitlines() if line.strip()]


def works_as(side, layout, name):
    """How a prefill or a decode reads such rows, False if it cannot."""
    table = DECODES if side == "decode" else PREFILLS
    letters = dict(zip(IMPLEMENTATIONS, table[LIKE.get(layout, layout)], strict=True))
    return letters[name] != "-" and letters[name]


def expected(layout, prefill, decode, mode):
    """PAGED, RAGGED or REFUSED."""
    reads = works_as("prefill", layout, prefill)
    if not reads or not works_as("decode", layout, decode):
        return REFUSED
    if layout == "fp8" and (prefill, decode) not in FP8_PAIRS:
        return REFUSED
    if mode not in EXTENDS or reads == "P":
        return PAGED
    return RAGGED if reads == "R" or mode == "EXTEND" else REFUSED


def cells(layouts=LAYOUTS, modes=(*MODES, None)):
    """All (layout, prefill, decode, mode)."""
    return list(itertools.product(layouts, IMPLEMENTATIONS, IMPLEMENTATIONS, modes))
