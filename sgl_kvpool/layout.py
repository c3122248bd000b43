"""Row formats of an MLA KV cache: the bytes of one token in one layer.

This is a leaf module: it imports neither torch nor SGLang, and it is the only place in the project
that spells a row's byte offsets. All other modules ask a :class:`RowFormat`.

A row of ``kv_lora_rank`` latent values ("nope") and ``qk_rope_head_dim`` rotary values ("rope") is
stored as up to three segments, always in the order nope, scale, rope, then zero bytes up to the
alignment. For a latent of 512 and a rope of 64::

    bf16              1152 B  | 512 x bf16                                   | 64 x bf16 |
    fp8                576 B  | 512 x e4m3                                   | 64 x e4m3 |
    fp8_block_scale    656 B  | 512 x e4m3     | 4 x float32, one per 128    | 64 x bf16 |
    fp4                416 B  | 256 x 2 e2m1   | 32 x ue5m3, one per 16      | 64 x bf16 |
    fp4_fp8_rope       352 B  | 256 x 2 e2m1   | 32 x ue5m3, one per 16      | 64 x e4m3 |

Everything is little-endian. ``docs/rows.md`` states the arithmetic of each encoding.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from enum import Enum, StrEnum
from functools import cache
from operator import index
from typing import NoReturn

#: Version of the byte tables below, contained in every storage key and handshake.
FORMAT_VERSION = 1

#: The latent rank must be a multiple of this: it is the block of ``fp8_block_scale``.
KV_LORA_RANK_MULTIPLE = 128

#: Rope widths that the codecs support. 0: the model's keys have no rotary values.
QK_ROPE_HEAD_DIMS = (0, 64)

#: Rows of a dense MLA pool are padded to a multiple of this, so that kernels move whole rows in 16-byte
#: accesses; rows of DSA pools are not padded, because SGLang's own are not.
POOL_ALIGN_BYTES, DSA_POOL_ALIGN_BYTES = 16, 1

#: Allowed row alignments. Kernels move at most 16 bytes at a time, so a larger alignment has no use.
ALIGNMENTS_BYTES = (1, 2, 4, 8, 16)


class Encoding(Enum):
    """How one value of a segment is stored; the enum's value is (name, bits per value)."""

    BF16 = ("bf16", 16)
    E4M3 = ("e4m3", 8)
    E2M1 = ("e2m1", 4)
    FP32 = ("fp32", 32)
    UE5M3 = ("ue5m3", 8)

    @property
    def bits(self) -> int:
        return self.value[1]

    def size_bytes(self, count: int) -> int:
        """Bytes of `count` values; callers pass counts that fill whole bytes."""
        return count * self.bits // 8


class SegmentEncoding(Enum):
    """How the latent or the rotary values of a row are stored.

    `scales`: Encoding of the scales that are stored beside the values; None for values without stored scales.
    `scale_block_values`: Values that share one stored scale; 0 without stored scales.
    `uses_k_scale`: Whether values are divided by the layer's k_scale before they are stored.
    """

    BF16 = (Encoding.BF16,)
    E4M3 = (Encoding.E4M3,)
    E4M3_BY_K_SCALE = (Encoding.E4M3, None, 0, True)
    E4M3_IN_TILES = (Encoding.E4M3, Encoding.FP32, 128)
    E2M1_IN_BLOCKS = (Encoding.E2M1, Encoding.UE5M3, 16)

    def __init__(
        self,
        values: Encoding,
        scales: Encoding | None = None,
        scale_block_values: int = 0,
        uses_k_scale: bool = False,
    ) -> None:
        self.values, self.scales = values, scales
        self.scale_block_values, self.uses_k_scale = scale_block_values, uses_k_scale


@dataclass(frozen=True)
class Segment:
    """One run of `count` equally encoded values inside a row, named ``"nope"``, ``"scale"`` or ``"rope"``."""

    name: str
    encoding: Encoding
    count: int
    offset_bytes: int

    @property
    def size_bytes(self) -> int:
        return self.encoding.size_bytes(self.count)

    @property
    def end_bytes(self) -> int:
        return self.offset_bytes + self.size_bytes


#: Values of `--kv-cache-dtype` that SGLang treats alike.
_DTYPE_ALIASES = {"bfloat16": ("bfloat16", "bf16"), "fp8_e4m3": ("fp8_e4m3",)}
#: The `kv_cache_dtype` that names a precision. SGLang's names of 4-bit dtypes stand for formats of its own.
_PRECISIONS = {Encoding.BF16: "bfloat16", Encoding.E4M3: "fp8_e4m3"}
_E = SegmentEncoding


class MLAKVCacheLayout(StrEnum):
    """The bytes of a KV row. The value is that of ``--kv-cache-layout``.

    `latent`: Encoding of the latent values, the key of the tables of decode tiles and of benchmark targets.
    `rope`: Encoding of the rotary values, without stored scales.
    `is_sglang_native`: Whether SGLang's own writers, readers and peers use the same bytes.

    Examples
    --------
    >>> fmt = MLAKVCacheLayout("fp4").row_format(kv_lora_rank=512, qk_rope_head_dim=64)
    >>> fmt.row_bytes
    416
    """

    latent: SegmentEncoding
    rope: SegmentEncoding
    #: `kv_cache_dtype` that SGLang sees, for dense MLA models and for DSA models.
    _dtypes: tuple[str, str]
    is_sglang_native: bool

    BF16 = "bf16", _E.BF16, _E.BF16, ("bfloat16", "bfloat16"), True
    FP8_NOPE_FP8_ROPE = "fp8", _E.E4M3_BY_K_SCALE, _E.E4M3_BY_K_SCALE, ("fp8_e4m3", "fp8_e4m3")
    FP8_NOPE_WITH_BLOCK_SCALE_BF16_ROPE = (
        "fp8_block_scale", _E.E4M3_IN_TILES, _E.BF16, ("bfloat16", "fp8_e4m3"),
    )  # fmt: skip
    FP4 = "fp4", _E.E2M1_IN_BLOCKS, _E.BF16
    FP4_NOPE_FP8_ROPE = "fp4_fp8_rope", _E.E2M1_IN_BLOCKS, _E.E4M3

    def __new__(
        cls,
        value: str,
        latent: SegmentEncoding = _E.BF16,  # defaults, because mypy takes a look-up by value for this call
        rope: SegmentEncoding = _E.BF16,
        dtypes: tuple[str, str] = ("bfloat16", "bfloat16"),
        is_sglang_native: bool = False,
    ) -> MLAKVCacheLayout:
        if rope.scales is not None:
            raise ValueError(f"a rope in {rope.name} has stored scales, for which rows have no segment")
        if latent.uses_k_scale != rope.uses_k_scale:
            # The scores of both segments are one sum, which the decode kernels multiply by k_scale.
            raise ValueError(
                f"a latent in {latent.name} and a rope in {rope.name}: either both segments are divided by "
                "k_scale, or neither is"
            )
        layout = str.__new__(cls, value)
        layout._value_, layout.latent, layout.rope = value, latent, rope
        layout._dtypes, layout.is_sglang_native = dtypes, is_sglang_native
        return layout

    @classmethod
    def _missing_(cls, value: object) -> NoReturn:
        raise ValueError(f"unknown KV cache layout {value!r}; choose one of: {', '.join(cls)}")

    @property
    def is_packed(self) -> bool:
        """True if a row holds scales, or values of several encodings, so that no torch dtype describes it.

        SGLang keeps such rows as uint8; only readers that know the layout can use them.
        """
        return self.latent.scales is not None or self.latent.values is not self.rope.values

    @property
    def is_narrow(self) -> bool:
        """True if a row has fewer bytes than a bf16 row."""
        geometry = KV_LORA_RANK_MULTIPLE, max(QK_ROPE_HEAD_DIMS)
        return self.row_format(*geometry).payload_bytes < Encoding.BF16.size_bytes(sum(geometry))

    @property
    def uses_k_scale(self) -> bool:
        """True if all values are divided by the layer's k_scale before they are stored."""
        return self.latent.uses_k_scale

    def sglang_kv_cache_dtype(self, *, is_dsa: bool = False) -> str:
        """The ``kv_cache_dtype`` that SGLang sees while this layout is in use."""
        return self._dtypes[is_dsa]

    @property
    def accepted_kv_cache_dtypes(self) -> tuple[str, ...]:
        """Values of ``--kv-cache-dtype`` that do not contradict this layout, for every model.

        What SGLang sees while the layout is in use, or the precision of the latent.
        """
        dtypes = {*self._dtypes, _PRECISIONS.get(self.latent.values)}
        return ("auto", *(alias for name, same in _DTYPE_ALIASES.items() if name in dtypes for alias in same))

    def pool_row_format(self, kv_lora_rank: int, qk_rope_head_dim: int, *, is_dsa: bool = False) -> RowFormat:
        """`row_format` with the row padding of a dense MLA pool or of a DSA pool."""
        align_bytes = DSA_POOL_ALIGN_BYTES if is_dsa else POOL_ALIGN_BYTES
        return self.row_format(kv_lora_rank, qk_rope_head_dim, align_bytes=align_bytes)

    def row_format(
        self, kv_lora_rank: int, qk_rope_head_dim: int, *, align_bytes: int = POOL_ALIGN_BYTES
    ) -> RowFormat:
        """Byte table of a row for one geometry.

        `kv_lora_rank`: Latent values per token, a positive multiple of 128.
        `qk_rope_head_dim`: Rotary values per token, 0 or 64.
        `align_bytes`: Rows are padded with zeros to a multiple of this. 16 lets every kernel move whole rows
          in 16-byte accesses. `pool_row_format` chooses the alignment of a pool.
        TypeError: if a number is not an integer.
        ValueError: if the geometry or the alignment is outside the limits above.
        """
        return _row_format(self, index(kv_lora_rank), index(qk_rope_head_dim), index(align_bytes))


def check_complete(table: Container[MLAKVCacheLayout], name: str) -> None:
    """Raise RuntimeError if a table lacks a layout; `name` is the table's name and module for the message."""
    if missing := [layout.value for layout in MLAKVCacheLayout if layout not in table]:
        raise RuntimeError(f"{name} has no line for KV cache layout {', '.join(missing)}; add one for each")


@dataclass(frozen=True)
class RowFormat:
    """The bytes of one row: a layout applied to a geometry. Built by `MLAKVCacheLayout.row_format`.

    `kv_lora_rank`, `qk_rope_head_dim`: R and P: a row has R latent values followed by P rotary values.
    `nope`: The latent values.
    `scale`: One scale per `scale_block_values` latent values, in the order of the values.
    `rope`: None if P is 0.
    """

    layout: MLAKVCacheLayout
    kv_lora_rank: int
    qk_rope_head_dim: int
    align_bytes: int
    nope: Segment
    scale: Segment | None
    rope: Segment | None

    def __hash__(self) -> int:
        """Hash of the fields that determine all others; kernels look up by format at every call."""
        return hash((self.layout, self.kv_lora_rank, self.qk_rope_head_dim, self.align_bytes))

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The segments of this format, in the order of their offsets."""
        return tuple(s for s in (self.nope, self.scale, self.rope) if s is not None)

    @property
    def payload_bytes(self) -> int:
        """Bytes before the padding."""
        return self.segments[-1].end_bytes

    @property
    def row_bytes(self) -> int:
        """Bytes of a whole row, padding included."""
        return -(-self.payload_bytes // self.align_bytes) * self.align_bytes

    @property
    def padding_bytes(self) -> int:
        """Zero bytes at the end of a row."""
        return self.row_bytes - self.payload_bytes

    @property
    def head_dim(self) -> int:
        """Values per row, R + P."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def scale_block_values(self) -> int:
        """Latent values that share a stored scale; 0 without stored scales."""
        return 0 if self.scale is None else self.nope.count // self.scale.count

    def in_layout(self, layout: MLAKVCacheLayout) -> RowFormat:
        """The row of another layout that holds the same values."""
        return layout.row_format(self.kv_lora_rank, self.qk_rope_head_dim, align_bytes=self.align_bytes)

    @property
    def tag(self) -> str:
        """Name of the exact byte format, for storage keys and handshakes."""
        return (
            f"{self.layout.value}-r{self.kv_lora_rank}-p{self.qk_rope_head_dim}"
            f"-b{self.row_bytes}-v{FORMAT_VERSION}"
        )


@cache
def _row_format(
    layout: MLAKVCacheLayout, kv_lora_rank: int, qk_rope_head_dim: int, align_bytes: int
) -> RowFormat:
    if kv_lora_rank <= 0 or kv_lora_rank % KV_LORA_RANK_MULTIPLE:
        raise ValueError(
            f"kv_lora_rank={kv_lora_rank} is not a positive multiple of {KV_LORA_RANK_MULTIPLE}; "
            "no layout of sgl-kvpool stores such a latent, serve the model without --kv-cache-layout"
        )
    if qk_rope_head_dim not in QK_ROPE_HEAD_DIMS:
        raise ValueError(
            f"qk_rope_head_dim={qk_rope_head_dim} is not one of {QK_ROPE_HEAD_DIMS}; no layout of "
            "sgl-kvpool stores such a rope, serve the model without --kv-cache-layout"
        )
    if align_bytes not in ALIGNMENTS_BYTES:
        raise ValueError(f"align_bytes={align_bytes} is not one of {ALIGNMENTS_BYTES}")

    latent = layout.latent
    nope = Segment("nope", latent.values, kv_lora_rank, 0)
    end = nope.end_bytes
    scale = rope = None
    if latent.scales is not None:
        scale = Segment("scale", latent.scales, kv_lora_rank // latent.scale_block_values, end)
        end = scale.end_bytes
    if qk_rope_head_dim:
        rope = Segment("rope", layout.rope.values, qk_rope_head_dim, end)
    return RowFormat(layout, kv_lora_rank, qk_rope_head_dim, align_bytes, nope, scale, rope)
