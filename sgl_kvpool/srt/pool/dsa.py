"""The pool of models with sparse attention: SGLang's `DSATokenToKVPool` with rows of a chosen layout.

Rows are those of `LayoutMLATokenToKVPool` without padding: SGLang's kernels read rows of 656, 528 and 264
bytes. The pages of index keys beside them are SGLang's own.

SGLang's DSA backend requests the rows before it chooses their reader. Therefore `get_key_buffer` raises for
no layout here: rows that SGLang cannot read are returned as uint8, and the readers are hooked
(`sgl_kvpool.sglang_plugin.hooks.dsa`).
"""

import torch
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool
from sglang.srt.runtime_context import get_parallel

from sgl_kvpool.memory.arrangement import KVArrangement
from sgl_kvpool.refusal import Refusal
from sgl_kvpool.srt import overrides
from sgl_kvpool.srt.facts.readers import DSA_BACKEND, sglang_dsa_reads
from sgl_kvpool.srt.pool.mla import LayoutMLATokenToKVPool


class LayoutDSATokenToKVPool(LayoutMLATokenToKVPool, DSATokenToKVPool):
    """`DSATokenToKVPool` that stores rows of one `MLAKVCacheLayout`.

    Takes SGLang's own arguments, and `options` by keyword. ValueError as `LayoutMLATokenToKVPool`, also for a
    `kv_cache_dim` from SGLang that belongs to rows of another layout.
    """

    serves_dsa = True

    def __init__(self, *args, kv_cache_dim: int, **kwargs):
        # Set first, because the base classes' constructors call _check_what_sglang_reads.
        self._sglang_row_values = kv_cache_dim
        super().__init__(*args, kv_cache_dim=kv_cache_dim, **kwargs)

    def _check_readers(self) -> None:
        assert {*self.options.readers} <= {DSA_BACKEND}, self.options.readers
        # SGLang's DSA kernels read rows that are adjacent.
        assert self.kv_cache_arrangement is KVArrangement.LAYER_MAJOR, self.kv_cache_arrangement

    def _check_what_sglang_reads(self) -> None:
        # SGLang's readers take `_sglang_row_values` as the width of a row: in values for rows without scales,
        # in bytes for rows with scales.
        row = self.row_format
        scaled = self.dsa_kv_cache_store_fp8
        expected = row.row_bytes if scaled else row.head_dim
        wanted = self.kv_cache_layout.is_packed and sglang_dsa_reads(self.kv_cache_layout)
        if scaled != wanted or self._sglang_row_values != expected:
            raise Refusal(
                f"SGLang's DSA implementations read rows of {self._sglang_row_values} "
                f"{'bytes' if scaled else 'values'}, which rows of KV cache layout {self.kv_cache_layout} do "
                "not have; use other --dsa-prefill-backend and --dsa-decode-backend, or leave both out"
            )

    @property
    def has_our_tier(self) -> bool:
        """As in the base class; always where ranks hold parts of the rows and all index keys."""
        return super().has_our_tier or get_parallel().attn_dcp_size > 1

    @property
    def index_pages(self) -> list[torch.Tensor]:
        # A page of rows that are spread over ranks has as many pages of keys, which every rank has.
        keys = [keys.view(torch.uint8) for keys in self.index_k_with_scale_buffer if len(keys)]
        return [pages.view(-1, self.dcp_size * pages.shape[1]) for pages in keys]

    @overrides
    def host_pool_decls(self):
        """The rows; and the index keys unless pages of our host tier hold them beside the rows."""
        if self.has_our_tier:
            # SGLang's pool of keys refuses pages of a draft over some numbers of ranks.
            return super(DSATokenToKVPool, self).host_pool_decls()
        return super().host_pool_decls()

    @overrides
    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        """Rows of a layer, `[slots, 1, row]`: in SGLang's dtype if SGLang reads the layout, else uint8."""
        stored = self._stored(layer_id)
        if not sglang_dsa_reads(self.kv_cache_layout):
            return stored
        return stored if self.store_dtype == self.dtype else stored.view(self.dtype)
