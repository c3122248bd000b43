"""The MLA pool: SGLang's `MLATokenToKVPool` with rows of a chosen `MLAKVCacheLayout` and a `KVArrangement`.

In packed layouts every layer is one uint8 tensor `[slots, 1, row_bytes]`. Because a row is contiguous, the
pool inherits everything in SGLang that moves rows (`move_kv_cache`, CPU copies, buffer descriptions for
transfer engines, sizes), and overrides only methods that interpret a row. `bf16` and `fp8` keep SGLang's own
tensors, so that SGLang's own attention backends can read them.

`layer_major` is SGLang's arrangement. In the others, layers are views of one buffer: where SGLang indexes
with slots, the pool indexes with row numbers (`slot_to_row`), and moves, sizes and buffer descriptions use
the whole buffer instead of a loop over layers.
"""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool, unwrap_write_loc
from sglang.srt.utils.async_probe import maybe_detect_oob

from sgl_kvpool import codec, env
from sgl_kvpool.codec import gather_parts, store_rows
from sgl_kvpool.memory.arrangement import RowPlacement, global_slots, local_slots
from sgl_kvpool.refusal import Refusal
from sgl_kvpool.srt import overrides
from sgl_kvpool.srt.facts.readers import check_readers
from sgl_kvpool.srt.pool.row_pool import PoolOptions, RowPool, RowWriteLoc

#: torch dtypes for the `kv_cache_dtype` that SGLang sees.
SGLANG_DTYPES = {"bfloat16": torch.bfloat16, "fp8_e4m3": torch.float8_e4m3fn}


class LayoutMLATokenToKVPool(MLATokenToKVPool, RowPool):
    """`MLATokenToKVPool` that stores rows of one `MLAKVCacheLayout`.

    Takes SGLang's own arguments, and `options` by keyword.

    ValueError: for a geometry that no layout stores, a dtype other than the one that SGLang has to see, a
      reader that cannot read the rows, or, in an arrangement other than `layer_major`, a number of slots that
      is not a multiple of the page size.
    """

    #: Whether the class is for models with sparse attention.
    serves_dsa = False
    #: The buffer of all layers, `[pages, page_bytes]` int8, in which `placement` says where rows lie; None if
    #: each layer has its own, as SGLang allocates them.
    cross_layer: torch.Tensor | None = None
    #: The `ErrorSample` of a server with `--kv-error-sample`.
    error_sample: Any = None

    def __init__(self, *args, options: PoolOptions, **kwargs):
        self.options = options  # the base class's constructor calls _create_buffers
        self._check_readers()
        env.flag(env.CHECK_FINITE)  # an invalid value has to fail now, not at a write
        super().__init__(*args, **kwargs)

    def _check_readers(self) -> None:
        check_readers(self.kv_cache_layout, self.kv_cache_arrangement, self.options.readers)

    @overrides
    def _create_buffers(self) -> None:
        assert self.use_dsa == self.serves_dsa, type(self)
        expected = SGLANG_DTYPES[self.kv_cache_layout.sglang_kv_cache_dtype(is_dsa=self.use_dsa)]
        if self.dtype != expected:
            raise Refusal(
                f"SGLang sees layout {self.kv_cache_layout} as {expected}, but the pool was built "
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
        if self.kv_cache_arrangement.has_contiguous_layers or not self.layer_num:
            super()._create_buffers()  # a pipeline stage may have no layer
        else:
            self._create_cross_layer_buffer()
        slot_bytes = {buffer[0].nbytes for buffer in self.kv_buffer}
        if slot_bytes - {self.row_format.row_bytes}:
            raise RuntimeError(
                f"a slot of the {self.kv_cache_layout} pool has {sorted(slot_bytes)} bytes, its rows have "
                f"{self.row_format.row_bytes}; this SGLang allocates MLA pools differently"
            )

    def _check_what_sglang_reads(self) -> None:
        """Refuse rows that SGLang's readers cannot read, before anything is allocated."""

    def _create_cross_layer_buffer(self) -> None:
        slots = self.size + self.page_size  # padded tokens write to a slot of the first page
        if slots % self.page_size:
            raise Refusal(
                f"a pool of {self.size} tokens is not a multiple of the page size {self.page_size}, which "
                f"{self.kv_cache_arrangement} needs; make --max-total-tokens a multiple of --page-size"
            )
        placement = self.placement = RowPlacement(
            self.kv_cache_arrangement,
            self.layer_num,
            slots // self.page_size,
            self.page_size,
            self.row_format.row_bytes,
        )
        memory_pool = torch.cuda.use_mem_pool(self.custom_mem_pool) if self.custom_mem_pool else nullcontext()
        with self.memory_saver_adapter.region(GPU_MEMORY_TYPE_KV_CACHE), memory_pool:
            shape = (placement.pages, placement.page_bytes)
            self.cross_layer = torch.zeros(shape, dtype=torch.int8, device=self.device)
        buffer = self.cross_layer.view(-1).view(torch.uint8)
        self.kv_buffer = [
            placement.layer_view(buffer, index).view(self.store_dtype).unsqueeze(1)
            for index in range(self.layer_num)
        ]

    @overrides
    def _clear_buffers(self) -> None:
        super()._clear_buffers()
        self.cross_layer = self.placement = None

    def take_k_scales(self, k_scales: Mapping[int, float]) -> None:
        self.options = replace(self.options, k_scales=k_scales)

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
        return self._stored(layer_id).view(torch.uint8)

    @overrides
    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        """SGLang's key buffer for `bf16` and `fp8`, strided in token-major pools.

        TypeError for packed rows, which have no dtype, and if slots are not row numbers (page-major pools
        with more than one token per page).
        """
        self._require_values("get_key_buffer", layer_id)
        return super().get_key_buffer(layer_id)

    @overrides
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

    @overrides
    def get_kv_buffer_shape(self) -> tuple[torch.Size, torch.Size]:
        """Shapes `[slots, 1, R + P]` and `[slots, 1, R]` in values, for every layout."""
        slots = self.size + self.page_size
        return (torch.Size((slots, 1, self.row_format.head_dim)), torch.Size((slots, 1, self.kv_lora_rank)))

    def get_v_head_dim(self) -> int:
        """Number of a row's values that are attended as V: the latent."""
        return self.kv_lora_rank

    @overrides
    def get_mla_kv_buffer(
        self, layer, loc: torch.Tensor, dst_dtype: torch.dtype | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.decoded(layer.layer_id, loc, dst_dtype)

    def decoded(
        self, layer_id: int, loc: torch.Tensor, dst_dtype: torch.dtype | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Decoded latent `[tokens, 1, R]` and rope `[tokens, 1, P]` of slots, contiguous; no rope if P is 0.

        As in SGLang's pool, the default of `dst_dtype` is the pool's dtype; for `fp8` this means the stored
        values without multiplication by k_scale. For packed rows the default is bfloat16, whatever dtype
        SGLang sees.
        """
        dtype = dst_dtype or (torch.bfloat16 if self.kv_cache_layout.is_packed else self.dtype)
        as_stored = dtype == torch.float8_e4m3fn
        # Every e4m3 value is also a bf16 value, so stored values are exact in bf16.
        decoded = torch.bfloat16 if as_stored else dtype
        rows = self.get_row_buffer(layer_id).squeeze(1)
        tokens, rank, rope_dim = loc.shape[0], self.kv_lora_rank, self.qk_rope_head_dim
        nope = rows.new_empty((tokens, 1, rank), dtype=decoded)
        rope = rows.new_empty((tokens, 1, rope_dim), dtype=decoded) if rope_dim else None
        gather_parts(
            rows,
            self.slot_to_row(loc),
            self.row_format,
            nope.squeeze(1),
            None if rope is None else rope.squeeze(1),
            k_scale=1.0 if as_stored else self.k_scale(layer_id),
        )
        return nope.to(dtype), None if rope is None else rope.to(dtype)

    @overrides
    def set_kv_buffer(self, layer, loc_info, cache_k, cache_v, layer_id_override: int | None = None) -> None:
        """Store combined rows `cache_k` `[tokens, 1, R + P]`; ignores `cache_v`, which is part of them."""
        layer_id = layer.layer_id if layer_id_override is None else layer_id_override
        index = self._index(layer_id)
        if self.error_sample is not None:
            self.error_sample.take(index, loc_info, cache_k)
        if self._stock_writers or self.dcp_size > 1:  # which SGLang's method refuses
            super().set_kv_buffer(layer, loc_info, cache_k, cache_v, layer_id_override)
            return
        k_nope, k_rope = cache_k[..., : self.kv_lora_rank], cache_k[..., self.kv_lora_rank :]
        self._store(index, layer_id, loc_info, k_nope, k_rope, "set_kv_buffer")

    @overrides
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
        if self.error_sample is not None:
            self.error_sample.take(index, loc_info, cache_k_nope, cache_k_rope)
        if self._stock_writers:
            super().set_mla_kv_buffer(layer, loc_info, cache_k_nope, cache_k_rope, layer_id_override)
            return
        self._store(index, layer_id, loc_info, cache_k_nope, cache_k_rope, "set_mla_kv_buffer")

    @property
    def _stock_writers(self) -> bool:
        """Whether SGLang's own writers store the bytes of these rows."""
        own = self.cross_layer is not None or self.dcp_size > 1
        return self.kv_cache_layout.is_sglang_native and not own

    def _store(self, index: int, layer_id: int, loc_info, k_nope, k_rope, method: str) -> None:
        loc, _, _ = unwrap_write_loc(loc_info)
        where = f"{method} ({self.kv_cache_layout})"
        self._check_physical_write_loc(loc_info, where)
        kv_indices = loc if isinstance(loc_info, RowWriteLoc) else self.rows_to_write(loc)
        rows = self.kv_buffer[index].squeeze(1).view(torch.uint8)  # [rows, row_bytes]
        # With several ranks, -1 is a token of another rank.
        maybe_detect_oob(kv_indices, 0 if self.dcp_size == 1 else -1, len(rows), where)
        # Writers do not wait for loads, because SGLang never writes a slot that a load is filling.
        store_rows(
            rows,
            kv_indices,
            k_nope.flatten(1),
            k_rope.flatten(1) if self.qk_rope_head_dim else None,
            self.row_format,
            k_scale=self.k_scale(layer_id),
        )

    @property
    def _slots_are_rows(self) -> bool:
        return self.placement is None or self.placement.slots_are_rows

    @overrides
    def get_kv_size_bytes(self) -> int:
        if self.cross_layer is None:
            return super().get_kv_size_bytes()
        return self.cross_layer.nbytes

    @overrides
    def get_contiguous_buf_infos(self) -> tuple[list[int], list[int], list[int]]:
        """Address, size and page size in bytes of every buffer: one per layer, or one for all layers."""
        if self.cross_layer is None:
            return super().get_contiguous_buf_infos()
        return [self.cross_layer.data_ptr()], [self.cross_layer.nbytes], [self.cross_layer.shape[1]]

    def get_device_pool_infos(self):
        """SGLang's description of the pool. It has one stride; TypeError unless slots are row numbers.

        SGLang's development branch rejects rows that are not contiguous, those of `token_major` too.
        """
        if not self._slots_are_rows:
            raise TypeError(
                f"SGLang's DevicePoolInfo cannot describe a {self.kv_cache_arrangement} pool; use "
                "sgl_kvpool.connectors.pools.describe"
            )
        return super().get_device_pool_infos()

    @property
    def has_our_tier(self) -> bool:
        """Whether the pool's host tier is a `HierarchicalMLAHostPool`; see `HostTierOptions.serves`."""
        device = torch.device(self.device).type
        return self.host_tier.serves(self.kv_cache_layout, self.kv_cache_arrangement, device)

    @property
    def index_pages(self) -> list[torch.Tensor]:
        """Index keys of each layer that has them, `[pages, bytes]` uint8; none without sparse attention."""
        return []

    @property
    def index_key_bytes(self) -> int:
        """Bytes of index keys of a page, over all layers."""
        return sum(keys.shape[1] for keys in self.index_pages)

    def host_tier_info(self):
        """SGLang's `MLABufferInfo` for any arrangement, for `HierarchicalMLAHostPool`.

        That class reads only sizes and layers from it and takes addresses from `CanonicalKVCaches`, so it may
        use the description that `get_device_pool_infos` refuses to other callers.
        """
        return super().get_device_pool_infos()[0].buffer_info

    @overrides
    def move_kv_cache(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        """Copy the rows of slots `src_loc` to slots `tgt_loc` in all layers."""
        if self.dcp_size > 1:
            raise NotImplementedError(
                f"move_kv_cache with --dcp-size {self.dcp_size}: source and target may be rows of "
                "different ranks"
            )
        if self.placement is None:
            super().move_kv_cache(tgt_loc, src_loc)
            return
        for loc, name in ((tgt_loc, "tgt_loc"), (src_loc, "src_loc")):
            maybe_detect_oob(loc, 0, self.size + self.page_size, f"move_kv_cache {name}")
        self.placement.move(self.cross_layer, tgt_loc, src_loc)

    @overrides
    def get_cpu_copy(self, indices, *args, **kwargs):
        return super().get_cpu_copy(self._rows_to_copy(indices), *args, **kwargs)

    @overrides
    def load_cpu_copy(self, kv_cache_cpu, indices, /, *args, **kwargs):
        super().load_cpu_copy(kv_cache_cpu, self._rows_to_copy(indices), *args, **kwargs)

    def _rows_to_copy(self, slots: torch.Tensor) -> torch.Tensor:
        # Torch would count a negative row from the end of the view, into the row of another token or layer.
        # These copies wait for the device anyway, so the check costs no extra synchronization.
        if self.cross_layer is not None and len(slots) and int(slots.min()) < 0:
            raise IndexError(f"slot {int(slots.min())} is not valid; leave out tokens without a slot")
        # With n ranks, SGLang's method then takes every n-th and divides it by n.
        return global_slots(self.slot_to_row(local_slots(slots, self.dcp_size)), 0, self.dcp_size)
