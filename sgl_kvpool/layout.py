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

from collections.abc import Container, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from operator import index

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
    """One run of equally encoded values inside a row.

    `name`: ``"nope"``, ``"scale"`` or ``"rope"``.
    `count`: Number of values.
    `offset_bytes`, `size_bytes`: Offset and size inside the row.
    `uses_k_scale`: Whether values are divided by the layer's k_scale before they are stored.
    """

    name: str
    encoding: Encoding
    count: int
    offset_bytes: int
    uses_k_scale: bool = False

    @property
    def size_bytes(self) -> int:
        return self.encoding.size_bytes(self.count)

    @property
    def end_bytes(self) -> int:
        return self.offset_bytes + self.size_bytes

    def divisor(self, k_scale: float) -> float:
        """Divisor applied to values before they are stored: the layer's k_scale, or 1.0 without one."""
        return k_scale if self.uses_k_scale else 1.0


@dataclass(frozen=True, kw_only=True)
class _Record:
    """Encodings of a layout and its properties in SGLang; all other properties follow from these."""

    latent: SegmentEncoding
    #: Encoding without stored scales.
    rope: SegmentEncoding
    #: `kv_cache_dtype` that SGLang sees, for dense MLA models and for DSA models.
    sglang_dtype: str = "bfloat16"
    sglang_dtype_dsa: str = "bfloat16"
    #: Whether SGLang's own writers, readers and peers use the same bytes.
    sglang_native: bool = False

    def __post_init__(self) -> None:
        if self.rope.scales is not None:
            raise ValueError(f"a rope in {self.rope.name} has stored scales, for which rows have no segment")
        if self.latent.uses_k_scale != self.rope.uses_k_scale:
            # The scores of both segments are one sum, which the decode kernels multiply by k_scale.
            raise ValueError(
                f"a latent in {self.latent.name} and a rope in {self.rope.name}: either both segments are "
                "divided by k_scale, or neither is"
            )


#: Values of `--kv-cache-dtype` that SGLang treats alike.
_DTYPE_ALIASES = {"bfloat16": ("bfloat16", "bf16"), "fp8_e4m3": ("fp8_e4m3",)}
#: The `kv_cache_dtype` that names a precision. SGLang's names of 4-bit dtypes stand for formats of its own.
_PRECISIONS = {Encoding.BF16: "bfloat16", Encoding.E4M3: "fp8_e4m3"}


class MLAKVCacheLayout(str, Enum):
    """The bytes of a KV row. The value is that of ``--kv-cache-layout``.

    Examples
    --------
    >>> fmt = MLAKVCacheLayout("fp4").row_format(kv_lora_rank=512, qk_rope_head_dim=64)
    >>> fmt.row_bytes
    416
    """

    BF16 = "bf16"
    FP8_NOPE_FP8_ROPE = "fp8"
    FP8_NOPE_WITH_BLOCK_SCALE_BF16_ROPE = "fp8_block_scale"
    FP4 = "fp4"
    FP4_NOPE_FP8_ROPE = "fp4_fp8_rope"

    def __str__(self) -> str:
        return self.value

    @classmethod
    def parse(cls, value: str | MLAKVCacheLayout) -> MLAKVCacheLayout:
        """Layout named by a string; ValueError that lists the names otherwise."""
        try:
            return cls(value)
        except ValueError:
            names = ", ".join(member.value for member in cls)
            raise ValueError(f"unknown KV cache layout {value!r}; choose one of: {names}") from None

    @property
    def _record(self) -> _Record:
        return _RECORDS[self]

    @property
    def latent(self) -> SegmentEncoding:
        """Encoding of the latent values, the key of the tables of decode tiles and of benchmark targets."""
        return self._record.latent

    @property
    def rope(self) -> SegmentEncoding:
        """Encoding of the rotary values."""
        return self._record.rope

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
    def needs_decoding(self) -> bool:
        """True if stored latent values must be decoded before a 16-bit matrix instruction can use them."""
        return self.latent.values is not Encoding.BF16

    @property
    def uses_k_scale(self) -> bool:
        """True if some values are divided by the layer's k_scale before they are stored."""
        return self.latent.uses_k_scale or self.rope.uses_k_scale

    def sglang_kv_cache_dtype(self, *, is_dsa: bool = False) -> str:
        """The ``kv_cache_dtype`` that SGLang sees while this layout is in use."""
        return self._record.sglang_dtype_dsa if is_dsa else self._record.sglang_dtype

    @property
    def is_sglang_native(self) -> bool:
        """True if SGLang's own writers, readers and peers use the same bytes."""
        return self._record.sglang_native

    @property
    def accepted_kv_cache_dtypes(self) -> tuple[str, ...]:
        """Values of ``--kv-cache-dtype`` that do not contradict this layout, for every model.

        What SGLang sees while the layout is in use, or the precision of the latent.
        """
        shown = {
            self._record.sglang_dtype,
            self._record.sglang_dtype_dsa,
            _PRECISIONS.get(self.latent.values),
        }
        return ("auto", *(alias for name, same in _DTYPE_ALIASES.items() if name in shown for alias in same))

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
    missing = [layout.value for layout in MLAKVCacheLayout if layout not in table]
    if missing:
        raise RuntimeError(f"{name} has no line for KV cache layout {', '.join(missing)}; add one for each")


def check_encodings(
    table: Container[tuple[Encoding, Encoding | None]],
    name: str,
    segments: Sequence[str] = ("latent", "rope"),
) -> None:
    """As `check_complete`, for a table with the encodings of values and of scales as keys."""

    def in_table(layout: MLAKVCacheLayout) -> bool:
        stored: list[SegmentEncoding] = [getattr(layout, segment) for segment in segments]
        return all((one.values, one.scales) in table for one in stored)

    check_complete([layout for layout in MLAKVCacheLayout if in_table(layout)], name)


_L, _E = MLAKVCacheLayout, SegmentEncoding

_RECORDS: dict[MLAKVCacheLayout, _Record] = {
    _L.BF16: _Record(latent=_E.BF16, rope=_E.BF16, sglang_native=True),
    _L.FP8_NOPE_FP8_ROPE: _Record(
        latent=_E.E4M3_BY_K_SCALE,
        rope=_E.E4M3_BY_K_SCALE,
        sglang_dtype="fp8_e4m3",
        sglang_dtype_dsa="fp8_e4m3",
    ),
    _L.FP8_NOPE_WITH_BLOCK_SCALE_BF16_ROPE: _Record(
        latent=_E.E4M3_IN_TILES, rope=_E.BF16, sglang_dtype_dsa="fp8_e4m3"
    ),
    _L.FP4: _Record(latent=_E.E2M1_IN_BLOCKS, rope=_E.BF16),
    _L.FP4_NOPE_FP8_ROPE: _Record(latent=_E.E2M1_IN_BLOCKS, rope=_E.E4M3),
}
check_complete(_RECORDS, "_RECORDS of sgl_kvpool/layout.py")


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

    @property
    def uses_k_scale(self) -> bool:
        """True if the values of some segment are divided by the layer's k_scale."""
        return any(segment.uses_k_scale for segment in self.segments)

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

    stored = layout._record
    nope = Segment("nope", stored.latent.values, kv_lora_rank, 0, stored.latent.uses_k_scale)
    end = nope.end_bytes
    scale = rope = None
    if stored.latent.scales is not None:
        scale = Segment("scale", stored.latent.scales, kv_lora_rank // stored.latent.scale_block_values, end)
        end = scale.end_bytes
    if qk_rope_head_dim:
        rope = Segment("rope", stored.rope.values, qk_rope_head_dim, end, stored.rope.uses_k_scale)
    return RowFormat(layout, kv_lora_rank, qk_rope_head_dim, align_bytes, nope, scale, rope)
