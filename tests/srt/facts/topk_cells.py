"""Combinations that `topk_transform` decides; docs/reference.md has what it says, for a change to be seen."""

import itertools

from codec_oracle import LAYOUTS

from sgl_kvpool.srt.facts import topk_transform

MODES = (*topk_transform.EXTEND_MODES, *topk_transform.DECODE_MODES, *topk_transform.IDLE_MODES)
REFUSED = "REFUSED"


def answer(*cell, **keywords):
    """What the code says of a cell: PAGED, RAGGED or REFUSED."""
    try:
        return topk_transform.select_topk_transform(*cell, **keywords).name
    except topk_transform.UnsupportedCombination:
        return REFUSED


def cells(layouts=LAYOUTS, modes=(*MODES, None)):
    """All (layout, prefill, decode, mode)."""
    names = topk_transform.IMPLEMENTATIONS
    return list(itertools.product(layouts, names, names, modes))
