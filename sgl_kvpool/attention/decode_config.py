"""How `mla_decode` cuts up its work: a table and a few lines of arithmetic, without autotuning.

Not measured on a device yet. The table follows from what the compiler makes of the kernel (registers, spills,
shared memory: ``docs/attention.md``, checked by ``tests/attention/test_decode_compiled.py``); the number of
splits follows from the number of programs that a GPU runs at a time.

A choice depends on shapes and on the device only, never on the contents of a tensor: a captured CUDA graph
is replayed with it for other lists.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from sgl_kvpool.layout import MLAKVCacheLayout, RowFormat

__all__ = [
    "DEFAULT_SM_COUNT",
    "MAX_LATENT_RANK",
    "MAX_PROGRAMS_PER_SM",
    "MAX_ROUNDS",
    "MAX_SPLITS",
    "DecodeConfig",
    "TileConfig",
    "config_of_tile",
    "decode_config",
    "partial_elements",
    "table",
    "tile_config",
]

#: Streaming multiprocessors of an H100 SXM and of an H200: what the choice assumes where there is no GPU.
DEFAULT_SM_COUNT = 132
#: Splits of a list, a power of two: one list alone then fills an H100 or H200.
MAX_SPLITS = 128
#: Times that a device may be filled for the sake of its last, partly filled round.
MAX_ROUNDS = 2
#: A split has at least this many blocks, unless the list has fewer.
MIN_BLOCKS = 2
#: Values per row that the accumulators of a program have room for.
MAX_LATENT_RANK = 512
#: Rows at a time: the side that a warp group's matrix instruction wants in units of 64.
BLOCK_ROWS = 64


@dataclass(frozen=True)
class TileConfig:
    """How a program works.

    Attributes
    ----------
    pairs : int
        (query, head) pairs it attends.
    block_rows : int
        Rows it reads at a time.
    warps, stages : int
        As Triton's `num_warps` and `num_stages`; only rows that need no decoding are staged.
    programs_per_sm : int
        How many fit an SM, by shared memory and registers.
    """

    pairs: int
    block_rows: int
    warps: int
    stages: int
    programs_per_sm: int


@dataclass(frozen=True)
class DecodeConfig:
    """A `TileConfig` and how often it runs.

    Attributes
    ----------
    tile : TileConfig
    tiles : int
        Tiles of pairs per list.
    splits : int
        Parts of every list.
    min_blocks : int
        Fewest blocks of a part.
    """

    tile: TileConfig
    tiles: int
    splits: int
    min_blocks: int


_L = MLAKVCacheLayout

#: Layout -> tiles, smaller ones first. One block of a program's rows, decoded, is 72 KB of shared memory and
#: its queries 18 KB per 16 pairs, so one program runs on an SM. Rows of `bf16` are operands as they are and
#: wait in shared memory, two blocks of them. The others pass through registers, of which there are 255 per
#: thread: tiles of 64 pairs would spill (some 200 bytes; 600 for `fp8_block_scale`).
_TABLE: dict[MLAKVCacheLayout, tuple[TileConfig, ...]] = {
    _L.BF16: tuple(TileConfig(pairs, BLOCK_ROWS, 8, 3, 1) for pairs in (16, 32, 64)),
    **{
        layout: tuple(TileConfig(pairs, BLOCK_ROWS, 8, 1, 1) for pairs in (16, 32))
        for layout in (_L.FP8_NOPE_FP8_ROPE, _L.FP8_NOPE_WITH_BLOCK_SCALE_BF16_ROPE, _L.FP4)
    },
}
#: For a layout that the table does not know yet: the smallest tile needs the fewest registers.
_FALLBACK = (TileConfig(pairs=16, block_rows=BLOCK_ROWS, warps=8, stages=1, programs_per_sm=1),)


#: Of all configurations.
MAX_PROGRAMS_PER_SM = max(tile.programs_per_sm for tiles in (*_TABLE.values(), _FALLBACK) for tile in tiles)


def table() -> Iterator[tuple[MLAKVCacheLayout, TileConfig]]:
    """Every configuration that `decode_config` may choose."""
    for layout, tiles in _TABLE.items():
        for tile in tiles:
            yield layout, tile


@cache
def tile_config(layout: MLAKVCacheLayout, pairs: int) -> TileConfig:
    """The smallest tile that takes all pairs of a list, else the largest there is."""
    tiles = _TABLE.get(layout, _FALLBACK)
    return next((tile for tile in tiles if pairs <= tile.pairs), tiles[-1])


@cache
def decode_config(
    fmt: RowFormat,
    heads: int,
    queries_per_list: int,
    lists: int,
    max_rows: int,
    sm_count: int = DEFAULT_SM_COUNT,
) -> DecodeConfig:
    """Configuration of one call.

    Parameters
    ----------
    fmt : RowFormat
    heads, queries_per_list : int
        Their product is the number of pairs that share the rows of a list.
    lists : int
        Groups of queries in the batch.
    max_rows : int
        Upper bound of a list's rows.
    sm_count : int
        Of the device.

    Returns
    -------
    DecodeConfig
        With the number of splits whose programs keep most of the device busy in up to `MAX_ROUNDS` rounds,
        the smallest of several; no more than `MAX_SPLITS` and than the bound has blocks for.
    """
    pairs = heads * queries_per_list
    return config_of_tile(tile_config(fmt.layout, pairs), pairs, lists, max_rows, sm_count)


def config_of_tile(tile: TileConfig, pairs: int, lists: int, max_rows: int, sm_count: int) -> DecodeConfig:
    """As `decode_config`, with a tile that the table need not have; `pairs` are those of a list."""
    tiles = -(-pairs // tile.pairs)
    slots = sm_count * tile.programs_per_sm
    blocks = -(-max_rows // tile.block_rows)
    most = max(1, min(MAX_SPLITS, -(-blocks // MIN_BLOCKS)))
    programs = max(lists * tiles, 1)

    def busy(splits: int) -> float:
        rounds = -(-programs * splits // slots)
        return programs * splits / (rounds * slots)

    # 64 lists of one tile: 2 splits are 128 programs on 132 multiprocessors. 80 lists: 3 splits, two rounds.
    splits = max(range(1, min(most, max(1, MAX_ROUNDS * slots // programs)) + 1), key=busy)
    return DecodeConfig(tile, tiles, splits, MIN_BLOCKS)


def partial_elements(fmt: RowFormat, tokens: int, heads: int, splits: int) -> int:
    """float32 numbers that the splits of one call write: results and lse; 0 without splits."""
    return splits * tokens * heads * (fmt.kv_lora_rank + 1) if splits > 1 else 0
