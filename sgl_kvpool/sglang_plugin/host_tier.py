"""Hooks of a scheduler with `--enable-hierarchical-cache`: our host pool, and transfers that may fail."""

from __future__ import annotations

from typing import Any

from sgl_kvpool import metrics
from sgl_kvpool.sglang_plugin import seams

__all__ = ["install"]

#: Longest file name of the file systems that SGLang's `file` store is used on.
_NAME_BYTES = 255
#: What a file's name holds beside the model's: a SHA-256 in hex, ranks, ending.
_KEY_BYTES = 64 + 32


def install() -> None:
    """Register and apply the hooks; part of `pools.install`."""
    build, build_draft, load, write, page_get, page_set = (
        seam.target for seam in seams.HOST_TIER if seam.hooked
    )
    seams.wrap(build, _build_kv_host_pool)
    seams.wrap(build_draft, _build_mha_mla_host_pool)
    seams.wrap(load, _load)
    seams.wrap(write, _write)
    seams.wrap(page_get, _generic_page_get)
    seams.wrap(page_set, _generic_page_set)


def _takes(kv_pool: Any) -> bool:
    """Whether a device pool gets our host pool; SGLang's serves its own tensors on a GPU.

    What neither serves is refused when the server starts (`refusals.check_host_tier`).
    """
    from sgl_kvpool.pool import LayoutMLATokenToKVPool

    return isinstance(kv_pool, LayoutMLATokenToKVPool) and str(kv_pool.device) == "cpu"


# -------------------------------------------------------------------- construction


def _build_kv_host_pool(
    original, *, kv_pool, page_size, host_size=None, mtp_draft_device_pools=(), pool_label="kv", **kwargs
):
    if not _takes(kv_pool):
        return original(
            kv_pool=kv_pool,
            page_size=page_size,
            host_size=host_size,
            mtp_draft_device_pools=mtp_draft_device_pools,
            pool_label=pool_label,
            **kwargs,
        )
    from sglang.srt.mem_cache.pool_host.common import get_allocator_type
    from sglang.srt.runtime_context import get_memory, get_serving

    from sgl_kvpool.host.pool import HierarchicalMLAHostPool

    pool = HierarchicalMLAHostPool(
        kv_pool,
        get_memory().hicache_ratio,
        get_memory().hicache_size if host_size is None else host_size,
        page_size,
        get_memory().hicache_mem_layout,
        draft_pools=mtp_draft_device_pools,
        allocator_type=get_allocator_type(),
        pool_label=pool_label,
    )
    if get_memory().hicache_storage_backend == "file":
        _check_file_names(get_serving().served_model_name, pool.storage_format_tag)
    return pool


def _check_file_names(model_name: str, tag: str) -> None:
    """ValueError for a model's name that is too long for the names of the `file` store."""
    name_bytes = _KEY_BYTES + len(f"{model_name}-{tag}".encode())
    if name_bytes > _NAME_BYTES:
        raise ValueError(
            f"--hicache-storage-backend file names its files after the model, and {model_name!r} makes names "
            f"of {name_bytes} bytes, {_NAME_BYTES} at most; give a shorter --served-model-name"
        )


def _build_mha_mla_host_pool(original, *, pool, host_to_device_ratio, page_size, layout, **kwargs):
    """The host pool of a draft that is not packed with its target."""
    if not _takes(pool):
        return original(
            pool=pool,
            host_to_device_ratio=host_to_device_ratio,
            page_size=page_size,
            layout=layout,
            **kwargs,
        )
    from sgl_kvpool.host.pool import HierarchicalMLAHostPool

    return HierarchicalMLAHostPool(pool, host_to_device_ratio, 0, page_size, layout, **kwargs)


# -------------------------------------------------------------------- before anything is queued


def _ours(host_pool: Any) -> bool:
    from sgl_kvpool.host.pool import HierarchicalMLAHostPool

    return isinstance(host_pool, HierarchicalMLAHostPool)


def _load(original, self, host_indices, *args, device_indices=None, **kwargs):
    """Queue a load if its lists are good; None is a miss for SGLang, which computes the tokens again.

    Behind this call the tree takes the tokens for loaded, so nothing later can refuse.
    """
    pool = self.mem_pool_host.anchor_entry.host_pool
    if not _ours(pool):
        return original(self, host_indices, *args, device_indices=device_indices, **kwargs)
    problem = pool.slots_problem(host_indices)
    if problem is None and device_indices is not None:
        problem = pool.device_slots_problem(device_indices)
    if problem is not None:
        metrics.failed("load_pages", problem)
        return None
    queued = len(self.load_queue)
    found = original(self, host_indices, *args, device_indices=device_indices, **kwargs)
    if found is None or device_indices is not None:
        return found
    problem = pool.device_slots_problem(found)
    if problem is None:
        return found
    # SGLang's allocator gave slots that are no pages of the pool, or gave one twice. They are not given back:
    # a second owner of a slot would read the first one's rows.
    del self.load_queue[queued:]
    metrics.failed("load_pages", f"{problem}, from the allocator of the device pool")
    return None


def _write(original, self, device_indices, *args, **kwargs):
    """Queue a backup if its list is good; None leaves the node not backed up."""
    pool = self.mem_pool_host.anchor_entry.host_pool
    if _ours(pool):
        problem = pool.device_slots_problem(device_indices)
        if problem is not None:
            metrics.failed("backup_pages", problem)
            return None
    return original(self, device_indices, *args, **kwargs)


# -------------------------------------------------------------------- stores that copy


def _generic_page_get(original, self, operation, hash_values, host_indices, extra_info=None):
    """Pages that could be read, from the first on; a damaged one ends them and is a miss."""
    pool = self.storage_host_pool
    if not _ours(pool):
        return original(self, operation, hash_values, host_indices, extra_info)
    keys = _keys(self, hash_values, host_indices)
    with pool.stored_under(keys):
        try:
            return original(self, operation, hash_values, host_indices, extra_info)
        except Exception:  # which of the pages it was is found below
            pass
        for number, (slot, key) in enumerate(keys.items()):
            page = host_indices[number * self.page_size : (number + 1) * self.page_size]
            try:
                if original(self, operation, [key], page, extra_info) == 0:
                    return number
            except Exception as error:
                from sgl_kvpool.host.page_seal import DamagedPage

                kind = "page_digest" if isinstance(error, DamagedPage) else "page_read"
                # The store keeps it: stores do not replace a key. Once it is removed, it is written anew.
                metrics.failed(kind, f"page {key} of the store, host slot {slot}", error=error)
                return number
        return len(hash_values)


def _generic_page_set(original, self, hash_values, host_indices, extra_info=None):
    pool = self.storage_host_pool
    if not _ours(pool):
        return original(self, hash_values, host_indices, extra_info)
    try:
        with pool.stored_under(_keys(self, hash_values, host_indices)):
            stored = original(self, hash_values, host_indices, extra_info)
    except Exception as error:  # SGLang logs it too, and goes on without these pages
        metrics.failed("page_write", f"{len(hash_values)} pages", error=error)
        raise
    if not stored:
        metrics.failed("page_write", f"{len(hash_values)} pages, of which the store refused one")
    return stored


def _keys(controller: Any, hash_values: list[str], host_indices: Any) -> dict[int, str]:
    """Key of each page by its first host slot."""
    return dict(zip(host_indices[:: controller.page_size].tolist(), hash_values, strict=True))
