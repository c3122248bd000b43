"""Sectors of 32 bytes that the compiled kernels touch, counted by ptxrun, against the fewest possible."""

import codec_oracle as oracle
import pytest
import torch
from codec_oracle import LAYOUTS

from sgl_kvpool.codec import triton as kernels

pytestmark = pytest.mark.quick
TOKENS = 64
#: Rows at multiples of a sector; the others share the sectors at their ends.
ALIGNED = [name for name in LAYOUTS if oracle.row_format(name, 512, 64).row_bytes % 32 == 0]


def counted(runs, name):
    """What storing and gathering 64 rows of 512 and 64 values touches."""
    fmt = oracle.row_format(name, 512, 64)
    pool, slots = torch.zeros(TOKENS, fmt.row_bytes, dtype=torch.uint8), torch.arange(TOKENS)
    nope, keys = torch.randn(TOKENS, 512).bfloat16(), torch.randn(TOKENS, 64).bfloat16()
    kernels.store_rows(pool, slots, nope, keys, fmt, 1.0)
    kernels.gather_parts(pool, slots, fmt, nope, keys, 1.0)
    return [result for _, result in runs.launched]


@pytest.mark.parametrize("name", LAYOUTS)
def test_values_are_read_and_written_once(runs, name):
    """16-bit values beside the rows: a store's loads, a gather's stores."""
    store, gather = counted(runs, name)
    assert not [line for line in store.uncoalesced() if line["class"] == "ld_global"]
    assert not [line for line in gather.uncoalesced() if line["class"] == "st_global"]


@pytest.mark.parametrize("name", ALIGNED)
def test_rows_are_read_and_written_once(runs, name):
    assert not [line for result in counted(runs, name) for line in result.uncoalesced()]
