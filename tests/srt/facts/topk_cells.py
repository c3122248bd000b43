"""Combinations that `topk_transform` decides; docs/reference.md has what it says, for a change to be seen."""

import itertools

from codec_oracle import LAYOUTS

from sgl_kvpool.srt.facts.topk_transform import (
    DECODE_MODES,
    EXTEND_MODES,
    IDLE_MODES,
    IMPLEMENTATIONS,
    UnsupportedCombination,
    select_topk_transform,
)

MODES = (*EXTEND_MODES, *DECODE_MODES, *IDLE_MODES)
REFUSED = "REFUSED"


def answer(*cell, **keywords):
    """What the code says of a cell: PAGED, RAGGED or REFUSED."""
    try:
        return select_topk_transform(*cell, **keywords).name
    except UnsupportedCombination:
        return REFUSED


def cells(layouts=LAYOUTS, modes=(*MODES, None)):
    """All (layout, prefill, decode, mode)."""
    return list(itertools.product(layouts, IMPLEMENTATIONS, IMPLEMENTATIONS, modes))
