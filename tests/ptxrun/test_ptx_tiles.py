"""Every tile of `mla_decode` over several blocks of its own size, on ptxrun, against float64."""

import pytest
import test_ptx_decode
from decode_cases import make_case

from sgl_kvpool.attention.decode_config import table

TILES = [
    pytest.param(layout, tile, seed, id=f"{layout}-{tile.kernel}-{tile.query_heads}-heads-{seed}")
    for layout, tile, seed in test_ptx_decode.with_seeds(table("triton", "gluon"), [0, 1, 2])
]


def lists_of(tile):
    """Lists of three blocks and a rest, of two blocks, and of one row more than a block."""
    rows = tile.block_rows
    return ((3 * rows + 17,), (2 * rows,), (rows + 1,))


@pytest.mark.parametrize(("layout", "tile", "seed"), TILES)
def test_several_blocks(runs, layout, tile, seed):
    """One split. Turns of warps last from one instruction to hundreds; the last seed runs with `HOPPER`."""
    counts = lists_of(tile)
    case = make_case(layout.value, heads=tile.query_heads, counts=counts, width=counts[0][0], seed=seed)
    with runs.using(seed=seed, quantum=[1, 24, 400][seed], mma=seed // 2, approx=seed // 2):
        test_ptx_decode.decode(case, tile=tile)
    assert [name for name, _ in runs.launched] == [test_ptx_decode.KERNELS[tile.kernel]]
