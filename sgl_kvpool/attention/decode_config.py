"""How `mla_decode` splits its work: a table and a few lines of arithmetic, without autotuning.

The table has not been measured on a device yet. It follows from the load that a row puts on every unit of a
multiprocessor, counted in the machine code of each tile: ``docs/attention.md``,
``scripts/figures/attention_facts.py``. The number of splits follows from the number of programs that a GPU
runs at a time.

A choice depends on shapes and on the device only, never on the contents of a tensor, so that a captured CUDA
graph can be replayed for other lists.
"""

import itertools
from dataclasses import dataclass
from functools import cache

from sgl_kvpool import env
from sgl_kvpool.layout import MLAKVCacheLayout, RowFormat, SegmentEncoding, check_complete
from sgl_kvpool.refusal import Refusal

#: Streaming multiprocessors of an H100 SXM and of an H200: the default without a GPU.
DEFAULT_SM_COUNT = 132
#: A second round has to raise the device's utilization by this share, since every split writes partial
#: results.
_ROUND_COST = 0.05
#: Maximum number of splits of a list, a power of two: one list fills an H100 or H200 with two programs per
#: SM.
MAX_SPLITS = 256
#: Maximum number of rounds of programs, of which the last one may be partly filled.
MAX_ROUNDS = 2
#: Minimum number of rows of every split but a list's last, and the minimum if the lists alone fill an eighth
#: of the device; a shorter list is one split. The partial results of a split, 16 query heads in float32, cost
#: as much traffic as 157 rows of `fp4`; a list with one split writes no partial results.
_MIN_ROWS, _MIN_ROWS_OF_MANY_LISTS = 128, 256
_SHARE_OF_MANY_LISTS = 1 / 8
#: Number of lists for which a batch-invariant call is split, whatever their number: on an H100 16 splits for
#: one tile of query heads, so that a single long list uses 16 programs instead of 256.
INVARIANT_LISTS = 16
#: Maximum number of values per row that a program's accumulators hold.
MAX_LATENT_RANK = 512


@dataclass(frozen=True)
class TileConfig:
    """Tile and resources of a program."""

    #: Query heads of a program; n queries of h heads are n * h query heads.
    query_heads: int
    #: Rows read at a time: 64 for each warp group. A matrix instruction takes 64 rows: if two groups shared
    #: 64 rows, each would read all of them for the scores. `gluon_wide` has query heads on that side.
    block_rows: int
    #: Triton's `num_warps` and `num_stages`; only rows that need no decoding are staged. `gluon_wide` adds
    #: two warp groups to the one that is counted here.
    warps: int
    stages: int
    #: Number of programs that fit an SM, by shared memory and registers.
    programs_per_sm: int
    #: "triton" (`triton_decode`), "gluon" (`gluon_decode`) or "gluon_wide" (`gluon_wide`).
    kernel: str = "triton"
    #: For `gluon_decode`: parts of a row that take no shared memory, because they are loaded into registers
    #: when their block begins and are decoded last. 1 is the rope; each further part is 64 bytes of the
    #: latent.
    register_parts: int = 0

    @property
    def min_blocks(self) -> int:
        """Minimum number of blocks of every split but a list's last, if there are few lists."""
        return max(1, _MIN_ROWS // self.block_rows)


@dataclass(frozen=True)
class DecodeConfig:
    """A `TileConfig`, its tiles of query heads per list, and the maximum number of splits of a list; every
    split but the last has at least `min_blocks` blocks.
    """

    tile: TileConfig
    tiles: int
    splits: int
    min_blocks: int


def _single(query_heads: int, kernel: str = "triton", register_parts: int = 0) -> TileConfig:
    """Tile for one program per SM: two warp groups, each of which decodes and attends half of a block."""
    return TileConfig(query_heads, 128, 8, 1, 1, kernel, register_parts)


def _double(query_heads: int, kernel: str = "triton", register_parts: int = 0) -> TileConfig:
    """Tile for two programs per SM: one decodes while the other waits for products."""
    return TileConfig(query_heads, 64, 4, 1, 2, kernel, register_parts)


#: The tile of `gluon_wide`: one program of three warp groups per SM.
_WIDE = TileConfig(64, 64, 4, 1, 1, "gluon_wide")

_E = SegmentEncoding

#: Tiles of `triton_decode`: how latents are stored -> tiles, smaller ones first. 64 decoded rows are 72 KB of
#: shared memory, the queries 18 KB per 16 query heads. A thread has 255 registers both in two programs of 128
#: threads and in one of 256. If two programs would spill more than 128 bytes (32 query heads, and all tiles
#: with tile scales, which need separate products), one program takes 128 rows. Tiles of 64 query heads would
#: spill 700 bytes. Latents of `bf16` are operands without decoding; two blocks of them wait in shared memory,
#: so that only one program fits.
_TRITON_TABLE: dict[SegmentEncoding, tuple[TileConfig, ...]] = {
    _E.BF16: tuple(TileConfig(query_heads, 64, 4, 3, 1) for query_heads in (8, 16, 32)),
    _E.E4M3_BY_K_SCALE: (_double(8), _double(16), _single(32)),
    _E.E4M3_IN_TILES: (_single(8), _single(16), _single(32)),
    _E.E2M1_IN_BLOCKS: (_double(8), _double(16), _single(32)),
}
#: Tiles if Gluon's kernels can be used; `triton_decode` serves those that name no kernel. In `gluon_decode` a
#: block is also kept in shared memory as stored; the parts that do not fit there are register parts. 32 query
#: heads of `fp8_block_scale` would need six and spill 240 bytes: a half-filled tile of `gluon_wide` takes 44
#: clocks per row, Triton's tile 48. FP4's rope is one with 32 query heads, which saves clocks of shared
#: memory; with 16 it would spill.
_TABLE: dict[SegmentEncoding, tuple[TileConfig, ...]] = {
    _E.BF16: _TRITON_TABLE[_E.BF16],
    _E.E4M3_BY_K_SCALE: (_double(8, "gluon"), _double(16, "gluon", 2), _single(32, "gluon", 3), _WIDE),
    _E.E4M3_IN_TILES: (_double(8, "gluon", 1), _single(16, "gluon", 2), _WIDE),
    _E.E2M1_IN_BLOCKS: (_double(8, "gluon"), _double(16, "gluon"), _single(32, "gluon", 1), _WIDE),
}
_TABLES = {"gluon": _TABLE, "triton": _TRITON_TABLE}
check_complete(
    [layout for layout in MLAKVCacheLayout if all(layout.latent in tiles for tiles in _TABLES.values())],
    "_TABLE or _TRITON_TABLE of sgl_kvpool/attention/decode_config.py",
)

#: Maximum over all configurations.
MAX_PROGRAMS_PER_SM = max(
    tile.programs_per_sm for of in _TABLES.values() for tiles in of.values() for tile in tiles
)
#: kv_lora_rank of the rows that Gluon's kernels are written for.
_GLUON_RANK = 512
#: Compute capability of H100, H200 and H20, the least that `mla_decode` is written for. Gluon's kernels are
#: for this major version alone: LLVM ends a process that compiles them for another.
HOPPER = (9, 0)


def gpu_problem(capability: tuple[int, int]) -> str | None:
    """Why `mla_decode` does not run on GPUs of a compute capability, after its name; None if it does."""
    if capability >= HOPPER:
        return None
    needed, found = (f"{major}.{minor}" for major, minor in (HOPPER, capability))
    return f"needs a Hopper GPU (compute capability {needed}), and this one has {found}"


def table(*kernels: str) -> list[tuple[MLAKVCacheLayout, TileConfig]]:
    """Each configuration that `decode_config` may choose if `decode_kernel_of` returns one of `kernels`."""
    pairs = itertools.product(kernels, MLAKVCacheLayout)
    found = [(layout, tile) for kernel, layout in pairs for tile in _TABLES[kernel][layout.latent]]
    return list(dict.fromkeys(found))


@cache
def tile_config(layout: MLAKVCacheLayout, query_heads: int, kernel: str) -> TileConfig:
    """The smallest tile that takes all query heads of a list, or the largest tile if none does."""
    tiles = _TABLES[kernel][layout.latent]
    return next((tile for tile in tiles if query_heads <= tile.query_heads), tiles[-1])


@cache
def decode_kernel_of(fmt: RowFormat) -> str:
    """The table of tiles for rows of a format, "gluon" or "triton". The only place that decides it.

    KVPOOL_DECODE_KERNEL=triton selects Triton's kernel for all rows; gluon refuses rows or a Triton that do
    not allow Gluon's kernels.
    """
    requested = env.choice(env.DECODE_KERNEL)
    if requested == "triton":
        return requested
    obstacle = _gluon_obstacle(fmt)
    if obstacle and requested == "gluon":
        raise Refusal(f"{env.DECODE_KERNEL}=gluon, but {obstacle}; unset it to use the Triton kernel")
    return "triton" if obstacle else "gluon"


def rounds_values(fmt: RowFormat, query_heads: int) -> bool:
    """Whether a CUDA kernel rounds decoded values to bfloat16: `gluon_wide` those with tile scales."""
    tile = tile_config(fmt.layout, query_heads, decode_kernel_of(fmt))
    return tile == _WIDE and fmt.layout.latent is _E.E4M3_IN_TILES


def _gluon_obstacle(fmt: RowFormat) -> str | None:
    """Reason why Gluon's kernels cannot be used; None if they can."""
    if _TABLE[fmt.layout.latent] == _TRITON_TABLE[fmt.layout.latent]:
        return f"rows of {fmt.layout} need no decoding, and the Gluon kernel has no tile for them"
    if fmt.kv_lora_rank != _GLUON_RANK:
        return f"kv_lora_rank={fmt.kv_lora_rank} is not the {_GLUON_RANK} that Gluon's kernels read"
    import torch  # late: `sgl-kvpool doctor` reads the tables without it

    if torch.cuda.is_available():
        capability = torch.cuda.get_device_capability()
        if capability[0] != HOPPER[0]:
            return f"compute capability {capability} has no wgmma, which the Gluon kernel is written with"
    try:
        from triton import knobs
        from triton.experimental.gluon.language.nvidia import hopper  # noqa: F401
    except ImportError as error:
        return f"this Triton has no Gluon for Hopper ({error})"
    return "TRITON_INTERPRET=1, and Triton's interpreter has no Gluon" if knobs.runtime.interpret else None


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

    `heads * queries_per_list` query heads share the rows of a list, of which there are at most `max_rows`;
    `lists` is the number of groups of queries. The number of splits is the smallest that maximises the
    utilization of the device, in up to `MAX_ROUNDS` rounds of programs. Its limits are `MAX_SPLITS` and the
    number of splits that `max_rows` rows can fill.
    """
    query_heads = heads * queries_per_list
    tile = tile_config(fmt.layout, query_heads, decode_kernel_of(fmt))
    return config_of_tile(tile, query_heads, lists, max_rows, sm_count)


def config_of_tile(
    tile: TileConfig, query_heads: int, lists: int, max_rows: int, sm_count: int
) -> DecodeConfig:
    """As `decode_config`, for any tile, also outside the table; `query_heads` is the number per list."""
    tiles = -(-query_heads // tile.query_heads)
    slots = sm_count * tile.programs_per_sm
    blocks = -(-max_rows // tile.block_rows)
    programs = max(lists * tiles, 1)
    are_many = programs >= slots * _SHARE_OF_MANY_LISTS
    min_blocks = max(1, _MIN_ROWS_OF_MANY_LISTS // tile.block_rows) if are_many else tile.min_blocks
    most = max(1, min(MAX_SPLITS, -(-blocks // min_blocks)))

    def busy(splits: int) -> float:
        rounds = -(-programs * splits // slots)
        return programs * splits / (rounds * slots) * (1 - _ROUND_COST * (rounds - 1))

    # 64 lists of one tile, two programs per SM: 4 splits make 256 programs, of 264 that run at a time.
    # 100 lists: 5 splits in two rounds.
    splits = max(range(1, min(most, max(1, MAX_ROUNDS * slots // programs)) + 1), key=busy)
    return DecodeConfig(tile, tiles, splits, min_blocks)


def partial_elements(fmt: RowFormat, tokens: int, heads: int, splits: int) -> int:
    """float32 numbers that the splits of one call write, results and lse; 0 without splits."""
    return splits * tokens * heads * (fmt.kv_lora_rank + 1) if splits > 1 else 0
