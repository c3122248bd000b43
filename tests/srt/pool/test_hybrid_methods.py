"""Every public name of SGLang's HybridLinearKVPool: our pool beside SGLang's pool around an MLA pool.

If a SGLang release adds a method, this fails until the method's effect on packed rows has been checked and
the method is in one of the tables.
"""

import inspect

import pytest
import torch
from codec_oracle import PACKED
from pools import LAYOUTS, POOLED, hybrid_pool, layer, values

pytestmark = pytest.mark.usefixtures("published")

LAYER, SLOTS = 3, torch.tensor([1, 2])
INT32 = {"dtype": torch.int32}


def both(layout, kind):
    return (hybrid_pool(layout, **KINDS[kind], stock=stock) for stock in (False, True))


def combined(pool):
    nope, rope = values(2, 512, 64)
    return pool.set_kv_buffer(layer(LAYER), SLOTS, torch.cat([nope, rope], -1), nope)


def decode_tokens(pool):
    """One token each of two requests, the last of four tokens of a pooled key."""
    keys = torch.ones(2, 128, dtype=torch.bfloat16)
    at, blocks = torch.tensor([3, 3]), torch.arange(4, 12, **INT32).reshape(2, 4)
    return pool.kpool_decode_update_index_cache(
        LAYER, keys, keys, torch.ones(4, 128), blocks, SLOTS, at, at.to(torch.int32) + 1, at + 256
    )


#: Methods of all pools of MLA rows, with a call of each.
SHOWN = {
    "dsa_kv_cache_store_fp8": lambda pool: pool.dsa_kv_cache_store_fp8,
    "get_contiguous_buf_infos": lambda pool: pool.get_contiguous_buf_infos(),
    "get_cpu_copy": lambda pool: pool.get_cpu_copy(torch.arange(pool.page_size)),
    "get_key_buffer": lambda pool: pool.get_key_buffer(LAYER),
    "get_kv_buffer": lambda pool: pool.get_kv_buffer(LAYER),
    "get_kv_buffer_shape": lambda pool: pool.get_kv_buffer_shape(),
    "get_kv_cache_quant_method": lambda pool: pool.get_kv_cache_quant_method(),
    "get_kv_layer_ids": lambda pool: pool.get_kv_layer_ids(),
    "get_kv_size_bytes": lambda pool: pool.get_kv_size_bytes(),
    "get_mla_kv_buffer": lambda pool: pool.get_mla_kv_buffer(layer(LAYER), SLOTS, torch.bfloat16),
    "get_state_buf_infos": lambda pool: pool.get_state_buf_infos(),
    "get_state_conv_shard_groups": lambda pool: pool.get_state_conv_shard_groups(),
    "get_state_dim_per_tensor": lambda pool: pool.get_state_dim_per_tensor(),
    "get_state_layer_ids": lambda pool: pool.get_state_layer_ids(),
    "get_state_slice_outer_counts": lambda pool: pool.get_state_slice_outer_counts(),
    "get_v_head_dim": lambda pool: pool.get_v_head_dim(),
    "get_value_buffer": lambda pool: pool.get_value_buffer(LAYER),
    "host_pool_decls": lambda pool: pool.host_pool_decls(),
    "index_head_dim": lambda pool: pool.index_head_dim,
    "index_kpool": lambda pool: pool.index_kpool,
    "index_kpool_compress": lambda pool: pool.index_kpool_compress,
    "index_page_size": lambda pool: pool.index_page_size,
    "invalidate_index_buffer_for_layer": lambda pool: pool.invalidate_index_buffer_for_layer(LAYER),
    "kv_cache_dim": lambda pool: pool.kv_cache_dim,
    "load_cpu_copy": lambda pool: pool.load_cpu_copy(
        pool.get_cpu_copy(torch.arange(pool.page_size)), torch.arange(pool.page_size)
    ),
    "maybe_get_custom_mem_pool": lambda pool: pool.maybe_get_custom_mem_pool(),
    "move_kv_cache": lambda pool: pool.move_kv_cache(torch.tensor([3]), torch.tensor([1])),
    "post_capture_active": lambda pool: pool.post_capture_active,
    "quant_block_size": lambda pool: pool.quant_block_size,
    "register_layer_transfer_counter": lambda pool: pool.register_layer_transfer_counter(None),
    "set_kv_buffer": combined,
    "set_mla_kv_buffer": lambda pool: pool.set_mla_kv_buffer(layer(LAYER), SLOTS, *values(2, 512, 64)),
    "tail_extra_slots": lambda pool: pool.tail_extra_slots,
    # Methods of sparse attention: AssertionError without it; the last three also without pooled keys.
    "set_index_k_scale_buffer": lambda pool: pool.set_index_k_scale_buffer(
        LAYER, SLOTS, torch.ones(2, 128).to(torch.float8_e4m3fn), torch.ones(2, 1)
    ),
    "get_index_k_with_scale_buffer": lambda pool: pool.get_index_k_with_scale_buffer(LAYER),
    "get_broadcastable_index_k_with_scale_buffer": lambda pool: (
        pool.get_broadcastable_index_k_with_scale_buffer(LAYER)
    ),
    "get_index_k_scale_buffer": lambda pool: pool.get_index_k_scale_buffer(
        LAYER, torch.tensor([3], **INT32), torch.tensor([[1]], **INT32), 3, 3
    ),
    "get_compress_tail_buffers": lambda pool: pool.get_compress_tail_buffers(LAYER),
    "kpool_decode_update_index_cache": decode_tokens,
    "set_compress_tail_for_request": lambda pool: pool.set_compress_tail_for_request(
        LAYER, torch.tensor(1), *torch.ones(2, 1, 128, dtype=torch.bfloat16), 1, 0
    ),
}
OF_POOLED = {
    "get_compress_tail_buffers", "kpool_decode_update_index_cache", "set_compress_tail_for_request",
}  # fmt: skip
OF_SPARSE = {name for name in SHOWN if "index_k_" in name} | OF_POOLED

#: Methods of pools with separate keys and values, of quantised pools and of pools resized after a capture,
#: which SGLang's MLA pools do not have.
NOT_OF_MLA = {
    "finalize_backing", "get_dequant_workspace", "get_device_pool_infos",
    "get_flashinfer_decode_dequant_workspace_kv_buffer", "get_flashinfer_dequant_workspace_kv_buffer",
    "get_kv_scale_buffer", "get_raw_kv_buffer", "post_capture_backed_bytes",
}  # fmt: skip
#: Flags and numbers that SGLang reads from the class or the pool.
CONSTANTS = {
    "cpu_copy_carries_mamba": True, "host_capacity_bytes": None, "host_capacity_tokens": None,
    "host_transfer_translate": None, "layer_shard_enabled": False, "requires_physical_write_loc": False,
}  # fmt: skip

#: Getters that our pool refuses for packed rows, which have no view of values.
NO_VALUES = {"get_kv_buffer", "get_value_buffer"}
KINDS = {"dense": {}, "sparse": {"sparse": True}, "pooled": POOLED}
CASES = [(layout, kind) for layout in LAYOUTS for kind in KINDS]


def raised(call, pool):
    """The type of the exception, or None."""
    try:
        call(pool)
    except Exception as error:
        return type(error)
    return None


def expected_differences(layout, kind):
    """Exceptions of our pool (or None) where they differ from SGLang's."""
    if layout not in PACKED:
        return {}
    found = dict.fromkeys(NO_VALUES, TypeError)
    if kind == "dense":
        found["get_key_buffer"] = TypeError
    if layout == "fp8_block_scale" and kind != "dense":
        found["set_kv_buffer"] = None  # SGLang's pool refuses this method for scaled rows
    return found


def test_every_public_name_of_sglangs_class_is_known():
    from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool

    public = {name for name in dir(HybridLinearKVPool) if not name.startswith("_")}
    called = {
        name
        for name in public
        if callable(found := inspect.getattr_static(HybridLinearKVPool, name)) or isinstance(found, property)
    }
    assert not set(SHOWN) & NOT_OF_MLA
    assert called == set(SHOWN) | NOT_OF_MLA
    assert public - called == set(CONSTANTS)


@pytest.mark.parametrize(("layout", "kind"), CASES)
def test_ours_has_what_sglangs_has(layout, kind, monkeypatch):
    """The same exception type, or no exception, on both."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    differences = expected_differences(layout, kind)
    ours, stock = both(layout, kind)
    absent = {"dense": OF_SPARSE, "sparse": OF_POOLED, "pooled": set()}[kind]
    for name, call in SHOWN.items():
        wanted = raised(call, stock)
        assert raised(call, ours) == differences.get(name, wanted), name
        if kind == "pooled" and name == "move_kv_cache":
            assert wanted is AssertionError  # pooled keys would have to be recomputed
        elif name not in differences:
            assert wanted == (AssertionError if name in absent else None), name


@pytest.mark.parametrize(("layout", "kind"), CASES)
def test_constants_are_sglangs(layout, kind):
    ours, stock = both(layout, kind)
    for name, value in CONSTANTS.items():
        assert getattr(ours, name) is getattr(stock, name) is value, name
