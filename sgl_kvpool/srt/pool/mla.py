"""The MLA pool: SGLang's `MLATokenToKVPool` with rows of a chosen `MLAKVCacheLayout`.

In packed layouts every layer is one uint8 tensor `[slots, 1, row_bytes]`. Because a row is contiguous, the
pool inherits everything in SGLang that moves rows (`move_kv_cache`, CPU copies, buffer descriptions for
transfer engines, sizes), and overrides only methods that interpret a row. `bf16` and `fp8` keep SGLang's own
tensors, so that SGLang's own attention backends can read them. `sgl_kvpool.srt.pool.arranged` arranges the
layers in memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from sglang.srt.mem_cache.memory_pool import unwrap_write_loc
from sglang.srt.utils.async_probe import maybe_detect_oob

from sgl_kvpool import codec, env
from sgl_kvpool.attention.readers import check_readers
from sgl_kvpool.codec import gather_parts, store_rows
from sgl_kvpool.layout import MLAKVCacheLayout
from sgl_kvpool.memory.arrangement import KVArrangement
from sgl_kvpool.refusal import Refusal
from sgl_kvpool.srt.pool.arranged import ArrangedMLATokenToKVPool, RowWriteLoc
from sgl_kvpool.srt.pool.k_scales import checked_k_scales
from sgl_kvpool.srt.pool.row_pool import RowPool
from sgl_kvpool.transfer.host_options import HostTierOptions

__all__ = ["SHOWN_DTYPES", "LayoutMLATokenToKVPool"]

#: torch dtypes for the `kv_cache_dtype` that SGLang sees.
SHOWN_DTYPES = {"bfloat16": torch.bfloat16, "fp8_e4m3": torch.float8_e4m3fn}


class LayoutMLATokenToKVPool(ArrangedMLATokenToKVPool, RowPool):
    """`MLATokenToKVPool` that stores rows of one `MLAKVCacheLayout`.

    Takes SGLang's own arguments and the following ones by keyword.

    Parameters
    ----------
    kv_cache_layout : MLAKVCacheLayout or str
        Layout of a row.
    k_scales : mapping of int to float, optional
        k_scale by model layer id, for layouts that divide by it; 1.0 for layers without an entry. The scale
        belongs to the pool and not to the layer object of a call, because SGLang's prefill writes through a
        layer object without a scale, and one cache must not hold rows of two scales.
    kv_cache_arrangement : KVArrangement or str, optional
        Arrangement of the layers in memory.
    readers : sequence of str, optional
        Names of the attention backends that will read the pool.
    host_tier : HostTierOptions, optional
        Options of the pool's host tier.

    Attributes
    ----------
    cross_layer : CrossLayerRows or None
        The buffer of all layers; None if each layer has its own, as SGLang allocates them.
    host_tier : HostTierOptions

    Raises
    ------
    ValueError
        For a geometry that no layout stores, a dtype other than the one that SGLang has to see, a DSA model,
        a k_scale that is not finite and positive, a reader that cannot read the rows, or, in an arrangement
        other than `layer_major`, a number of slots that is not a multiple of the page size.
    """

    #: Whether the class is for models with sparse attention.
    serves_dsa = False

    def __init__(
        self,
        *args,
        kv_cache_layout: MLAKVCacheLayout | str,
        k_scales: Mapping[int, float] | None = None,
        kv_cache_arrangement: KVArrangement | str = KVArrangement.LAYER_MAJOR,
        readers: Sequence[str] = (),
        host_tier: HostTierOptions | None = None,
        **kwargs,
    ):
        # Set before the base class's constructor runs, because that calls _create_buffers.
        self.kv_cache_layout = MLAKVCacheLayout.parse(kv_cache_layout)
        self.kv_cache_arrangement = KVArrangement.parse(kv_cache_arrangement)
        self.host_tier = host_tier or HostTierOptions()
        self._check_readers(readers)
        self._k_scales = checked_k_scales(k_scales)
        env.flag(env.CHECK_FINITE)  # an invalid value has to fail now, not at a write
        super().__init__(*args, **kwargs)

    def _check_readers(self, readers: Sequence[str]) -> None:
        check_readers(self.kv_cache_layout, self.kv_cache_arrangement, readers)

    # ---------------------------------------------------------------- construction

    def _create_buffers(self) -> None:
        if self.use_dsa != self.serves_dsa:
            raise Refusal(
                f"{type(self).__name__} serves models {'with' if self.serves_dsa else 'without'} sparse "
                "attention (DSA); LayoutMLATokenToKVPool is for dense MLA, LayoutDSATokenToKVPool for DSA"
            )
        shown = SHOWN_DTYPES[self.kv_cache_layout.sglang_kv_cache_dtype(is_dsa=self.use_dsa)]
        if self.dtype != shown:
            raise Refusal(
                f"SGLang sees layout {self.kv_cache_layout} as {shown}, but the pool was built "
                f"with {self.dtype}; leave --kv-cache-dtype and --speculative-draft-kv-cache-dtype unset"
            )
        self.row_format = self.kv_cache_layout.pool_row_format(
            self.kv_lora_rank, self.qk_rope_head_dim, is_dsa=self.use_dsa
        )
        self._check_what_sglang_reads()
        if self.kv_cache_layout.is_packed:
            # One element is one byte, so the base class's shapes, sizes and item lengths are in bytes.
            self.kv_cache_dim = self.row_format.row_bytes
            self.store_dtype = torch.uint8
        codec.prepare(self.row_format, self.device)
        super()._create_buffers()
        slot_bytes = {buffer[0].nbytes for buffer in self.kv_buffer}
        if slot_bytes - {self.row_format.row_bytes}:
            raise RuntimeError(
                f"a slot of the {self.kv_cache_layout} pool has {sorted(slot_bytes)} bytes, its rows have "
                f"{self.row_format.row_bytes}; this SGLang allocates MLA pools differently"
            )

    def _check_what_sglang_reads(self) -> None:
        """Refuse rows that SGLang's readers cannot read, before anything is allocated."""

    def k_scale(self, layer_id: int) -> float:
        """Divisor of a model layer's values before they are stored; 1.0 for layouts without k_scale."""
        return self._k_scales.get(layer_id, 1.0) if self.kv_cache_layout.uses_k_scale else 1.0

    # ---------------------------------------------------------------- reading

    def _index(self, layer_id: int) -> int:
        """Index of a model layer in the pool; IndexError if the pool does not hold it."""
        index = layer_id - self.start_layer
        if not 0 <= index < self.layer_num:  # a negative index would select the rows of another layer
            raise IndexError(
                f"layer {layer_id} is outside of this pool, which holds layers {self.start_layer} to "
                f"{self.start_layer + self.layer_num - 1}"
            )
        return index

    def _stored(self, layer_id: int) -> torch.Tensor:
        index = self._index(layer_id)
        # Wait for the host tier: rows of this layer may still be loading.
        if self.layer_transfer_counter is not None:
            self.layer_transfer_counter.wait_until(index)
        return self.kv_buffer[index]

    def get_row_buffer(self, layer_id: int) -> torch.Tensor:
        """Stored bytes of a layer, `[rows, 1, row_bytes]` uint8, a view of the live pool.

        `slot_to_row(slots)` gives the rows of slots. Waits until a load of this layer from the host tier is
        done.
        """
        return self._stored(layer_id).view(torch.uint8)

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        """SGLang's key buffer for `bf16` and `fp8`, strided in token-major pools.

        TypeError for packed rows, which have no dtype, and if slots are not row numbers (page-major pools
        with more than one token per page).
        """
        self._require_values("get_key_buffer", layer_id)
        return super().get_key_buffer(layer_id)

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        """SGLang's value buffer, with the errors of `get_key_buffer`."""
        self._require_values("get_value_buffer", layer_id)
        return super().get_value_buffer(layer_id)

    def _require_values(self, method: str, layer_id: int) -> None:
        self._index(layer_id)  # the base class takes an id below the first layer as one of the last layers
        if not self._slots_are_rows:
            raise TypeError(
                f"{method} on a {self.kv_cache_arrangement} pool: slots do not index its rows "
                "directly; call get_row_buffer(layer_id) with slot_to_row(slots), or serve with "
                "--attention-backend kvpool_mla"
            )
        if self.kv_cache_layout.is_packed:
            raise TypeError(
                f"{method} on a {self.kv_cache_layout} pool: its rows contain scales beside the values, so "
                "only a reader that knows the layout can use them; call get_row_buffer(layer_id)"
                f"{'' if self.use_dsa else ', or serve with --attention-backend kvpool_mla'}"
            )

    def get_kv_buffer_shape(self) -> tuple[torch.Size, torch.Size]:
        """Shapes `[slots, 1, R + P]` and `[slots, 1, R]` in values, for every layout."""
        slots = self.size + self.page_size
        return (
            torch.Size((slots, 1, self.row_format.head_dim)),
            torch.Size((slots, 1, self.kv_lora_rank)),
        )

    def get_v_head_dim(self) -> int:
        """Number of a row's values that are attended as V: the latent."""
        return self.kv_lora_rank

    def get_mla_kv_buffer(
        self,
        layer,
        loc: torch.Tensor,
        dst_dtype: torch.dtype | None = None,
        layer_id_override: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Decoded latent and rope of some slots.

        Parameters
        ----------
        layer : RadixAttention
            Only its `layer_id` is used, unless there is an override.
        loc : torch.Tensor
            Slots, `[tokens]` int32 or int64.
        dst_dtype : torch.dtype, optional
            Dtype of the result. As in SGLang's pool, the default is the pool's dtype; for `fp8` this means
            the stored values without multiplication by k_scale. For packed rows the default is bfloat16,
            whatever dtype SGLang sees.

        Returns
        -------
        tuple of torch.Tensor
            `[tokens, 1, R]` and `[tokens, 1, P]`, each contiguous; the second is None if P is 0.
        """
        layer_id = layer.layer_id if layer_id_override is None else layer_id_override
        dtype = dst_dtype or (torch.bfloat16 if self.kv_cache_layout.is_packed else self.dtype)
        as_stored = dtype == torch.float8_e4m3fn
        # Every e4m3 value is also a bf16 value, so stored values are exact in bf16.
        decoded = torch.bfloat16 if as_stored else dtype
        rows = self.get_row_buffer(layer_id).squeeze(1)
        tokens, rank, rope_dim = loc.shape[0], self.kv_lora_rank, self.qk_rope_head_dim
        nope = torch.empty((tokens, 1, rank), dtype=decoded, device=rows.device)
        rope = None
        if rope_dim:
            rope = torch.empty((tokens, 1, rope_dim), dtype=decoded, device=rows.device)
        gather_parts(
            rows,
            self.slot_to_row(loc),
            self.row_format,
            nope.squeeze(1),
            None if rope is None else rope.squeeze(1),
            k_scale=1.0 if as_stored else self.k_scale(layer_id),
        )
        return nope.to(dtype), None if rope is None else rope.to(dtype)

    # ---------------------------------------------------------------- writing

    def set_kv_buffer(self, layer, loc_info, cache_k, cache_v, layer_id_override: int | None = None) -> None:
        """Store combined rows `cache_k` `[tokens, 1, R + P]`; ignores `cache_v`, which is part of them."""
        layer_id = layer.layer_id if layer_id_override is None else layer_id_override
        index = self._index(layer_id)
        if self._stock_writers:
            super().set_kv_buffer(layer, loc_info, cache_k, cache_v, layer_id_override)
            return
        nope, rope = cache_k[..., : self.kv_lora_rank], cache_k[..., self.kv_lora_rank :]
        self._store(index, layer_id, loc_info, nope, rope, "set_kv_buffer")

    def set_mla_kv_buffer(
        self, layer, loc_info, cache_k_nope, cache_k_rope, layer_id_override: int | None = None
    ) -> None:
        """Store rows from a latent `[tokens, 1, R]` and a rope `[tokens, 1, P]` (None or empty if P is 0).

        `loc_info` is a `KVWriteLoc` or a tensor of slots, or a `RowWriteLoc` of row numbers; `layer` may be
        None with `layer_id_override`.
        """
        layer_id = layer.layer_id if layer_id_override is None else layer_id_override
        index = self._index(layer_id)
        if cache_k_rope is None and self.qk_rope_head_dim:
            raise ValueError(
                f"cache_k_rope is None, but rows of this pool hold {self.qk_rope_head_dim} rotary values; "
                "the slots would keep the rotary values of their former tokens"
            )
        if cache_k_nope.shape[0] == 0:
            return
        if self._stock_writers:
            super().set_mla_kv_buffer(layer, loc_info, cache_k_nope, cache_k_rope, layer_id_override)
            return
        self._store(index, layer_id, loc_info, cache_k_nope, cache_k_rope, "set_mla_kv_buffer")

    @property
    def _stock_writers(self) -> bool:
        """Whether SGLang's own writers store the bytes of these rows."""
        return self.kv_cache_layout.is_sglang_native and self.cross_layer is None

    def _store(self, index: int, layer_id: int, loc_info, nope, rope, method: str) -> None:
        loc, _, _ = unwrap_write_loc(loc_info)
        where = f"{method} ({self.kv_cache_layout})"
        self._check_physical_write_loc(loc_info, where)
        kv_indices = loc if isinstance(loc_info, RowWriteLoc) else self.slot_to_row(loc)
        rows = self.kv_buffer[index].squeeze(1).view(torch.uint8)  # [rows, row_bytes]
        maybe_detect_oob(kv_indices, 0, len(rows), where)
        # Writers do not wait for loads, because SGLang never writes a slot that a load is filling.
        store_rows(
            rows,
            kv_indices,
            _flat(nope),
            _flat(rope) if self.qk_rope_head_dim else None,
            self.row_format,
            k_scale=self.k_scale(layer_id),
        )


def _flat(part: torch.Tensor) -> torch.Tensor:
    """A view `[tokens, width]` of `[tokens, 1, width]` or `[tokens, width]`."""
    return part.squeeze(1) if part.dim() == 3 else part
