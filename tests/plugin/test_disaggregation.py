"""Prefill and decode servers: what SGLang's own queues describe to peers, and what peers compare.

Both managers are SGLang's `CommonKVManager`, which every transfer engine's derives from, with the arguments
that SGLang's queues fill in for real pools, and the bootstrap server is SGLang's, over HTTP. Only what the
engines do themselves, the copy, is played by `ctypes.memmove`.
"""

import ctypes
import inspect
import itertools
import re
import socket
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from dsa_pools import INDEX_PAGE_BYTES, PAGE, dsa_pool, row_bytes, stock_pool
from host_tier import GUARD, LAYERS, LAYOUTS, ROW_BYTES, START, device_pool, fill, rows

from sgl_kvpool.demo.server import free_port

SHOWN = {"bf16": "bfloat16", "fp8": "fp8_e4m3", "fp8_block_scale": "bfloat16", "fp4": "bfloat16"}
#: The string of each layout, byte for byte: servers of other releases read it.
STRINGS = {
    "bf16": "bfloat16",
    "fp8": "fp8_e4m3+kvpool:fp8-r512-p64-b576-v1",
    "fp8_block_scale": "bfloat16+kvpool:fp8_block_scale-r512-p64-b656-v1",
    "fp4": "bfloat16+kvpool:fp4-r512-p64-b416-v1",
}


@pytest.fixture
def bootstrap(published):
    """SGLang's server that introduces prefill servers to decode servers; its address."""
    from sglang.srt.disaggregation.common.conn import CommonKVBootstrapServer

    port = free_port()
    server = CommonKVBootstrapServer("127.0.0.1", port)
    for _ in range(500):
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            break
        except ConnectionRefusedError:
            time.sleep(0.01)
    yield f"127.0.0.1:{port}"
    server.close()


@pytest.fixture
def no_groups(published):
    """A process without process groups, which a manager asks for."""
    from sglang.srt.runtime_context import get_parallel

    # Around SGLang's snapshot of a context, not within: that holds the very record that this changes.
    with get_parallel().override(pp_group=None):
        yield


@pytest.fixture
def manager_of(bootstrap, no_groups, monkeypatch):
    """`manager_of(mode, pool, layout, draft, ...)`: SGLang's manager of a server, with its queue's arguments.

    `layout` is what the server was asked for; None is a server without the plugin.
    """
    from sglang.srt.disaggregation import decode, prefill
    from sglang.srt.disaggregation.base.conn import KVArgs
    from sglang.srt.disaggregation.common.conn import CommonKVManager
    from sglang.srt.disaggregation.utils import KVClassType, MetadataBuffers, TransferBackend
    from sglang.srt.runtime_context import SpawnRanks, publish, restore_context, snapshot_context
    from sglang.srt.server_args import ServerArgs

    from sgl_kvpool.sglang_plugin import disaggregation, record
    from sgl_kvpool.sglang_plugin.record import LAYOUT

    monkeypatch.setattr(record, "_asked", set())
    disaggregation.install()
    classes = {KVClassType.KVARGS: KVArgs, KVClassType.MANAGER: CommonKVManager}
    for module in (prefill, decode):
        # The engines' own classes want their library and a network card.
        monkeypatch.setattr(module, "get_kv_class", lambda backend, kind: classes[kind])
    before = snapshot_context()
    made = []
    queues = {"prefill": prefill.PrefillBootstrapQueue, "decode": decode.DecodePreallocQueue}

    def build(mode, pool, layout="as the pool", draft=None, says_dtype=True, with_rows=None):
        model = SimpleNamespace(num_hidden_layers=LAYERS, hf_text_config=None)
        if with_rows is not None:  # a hybrid model, whose other layers have states
            model = SimpleNamespace(
                num_hidden_layers=2 * LAYERS,
                hf_text_config=SimpleNamespace(full_attention_layer_ids=with_rows),
            )
        args = ServerArgs(
            model_path="dummy", device="cpu", host="127.0.0.1", page_size=pool.page_size,
            disaggregation_mode=mode, disaggregation_bootstrap_port=int(bootstrap.rpartition(":")[2]),
        )  # fmt: skip
        publish(args, role="scheduler", ranks=SpawnRanks(0, None, 0))
        if layout == "as the pool":
            layout = pool.kv_cache_layout.value
        setattr(args, LAYOUT.attribute, layout)  # as a record that came from the launcher has it
        shown = (
            {torch.bfloat16: "bfloat16", torch.float8_e4m3fn: "fp8_e4m3"}[pool.dtype] if says_dtype else None
        )
        queue = object.__new__(queues[mode])
        vars(queue).update(
            transfer_backend=TransferBackend.MOONCAKE, tp_rank=0, pp_rank=0, is_mla_backend=True,
            token_to_kv_pool=pool, draft_token_to_kv_pool=draft, enable_staging=False,
            metadata_buffers=MetadataBuffers(4, 16, torch.float32, 0),
            scheduler=SimpleNamespace(
                rust_server=None, server_args=args, enable_hisparse=False,
                tp_worker=SimpleNamespace(model_runner=SimpleNamespace(kv_cache_dtype_str=shown)),
                model_config=model,
            ),
        )  # fmt: skip
        made.append(queue._init_kv_manager())
        return made[-1]

    yield build
    for manager in made:
        manager.server_socket.close(0)
    restore_context(before)


def pool_of(layout, make=device_pool, **extra):
    """A pool that has gone through our hook of SGLang's builder."""
    from sgl_kvpool.sglang_plugin import pools
    from sgl_kvpool.sglang_plugin.record import ARRANGEMENT, LAYOUT

    decided = SimpleNamespace(**{LAYOUT.attribute: layout, ARRANGEMENT.attribute: "auto"})
    builder = SimpleNamespace(server_args=decided, use_mla_backend=True, is_draft_worker=True)
    pool = make(layout, **extra)
    return pools._build_token_to_kv_pool(lambda self, **_: pool, builder, sizes=None)


# -------------------------------------------------------------------- the handshake


@pytest.mark.parametrize("mode", ["prefill", "decode"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_rows_are_in_what_peers_compare(manager_of, mode, layout):
    from sglang.srt.disaggregation.utils import kv_layout_signature

    manager = manager_of(mode, pool_of(layout))
    assert manager.kv_cache_dtype_str == manager.kv_args.kv_cache_dtype_str == STRINGS[layout]
    # Of the checksums of --disaggregation-enable-kv-checksum.
    signature = kv_layout_signature(manager.kv_args)
    manager.kv_args.kv_cache_dtype_str = SHOWN[layout]
    assert (kv_layout_signature(manager.kv_args) == signature) == (layout == "bf16")


@pytest.mark.parametrize(("prefill", "decode"), itertools.product(LAYOUTS, LAYOUTS))
def test_all_pairs_of_layouts(manager_of, bootstrap, prefill, decode):
    manager_of("prefill", pool_of(prefill))
    peer = manager_of("decode", pool_of(decode))
    if prefill == decode:
        assert peer.try_ensure_parallel_info(bootstrap)
        assert peer.prefill_info_table[bootstrap].kv_cache_dtype == STRINGS[prefill]
        return
    named = [
        f"rows of layout {x} ({STRINGS[x]})" if x != "bf16" else "SGLang's own rows (bfloat16)"
        for x in (prefill, decode)
    ]
    with pytest.raises(RuntimeError) as error:
        peer.try_ensure_parallel_info(bootstrap)
    assert str(error.value) == (
        f"KV cache layout mismatch: the prefill server at {bootstrap} stores {named[0]}, this decode server "
        f"{named[1]}. Start both with the same --kv-cache-layout; bf16 also works with servers that do not "
        "have sgl-kvpool."
    )
    assert bootstrap not in peer.prefill_info_table


def unhooked(peer, bootstrap):
    """`try_ensure_parallel_info` of a server without the plugin."""
    return inspect.unwrap(type(peer).try_ensure_parallel_info)(peer, bootstrap)


@pytest.mark.parametrize("layout", ["fp8", "fp8_block_scale", "fp4"])
def test_a_stock_peer_refuses_and_names_both(manager_of, bootstrap, layout):
    """With SGLang's own text, on whichever side it is."""
    stock = device_pool("bf16")
    manager_of("prefill", pool_of(layout))
    peer = manager_of("decode", stock, layout=None)
    text = f"server has kv_cache_dtype={STRINGS[layout]}, but decode server has kv_cache_dtype=bfloat16. Both"
    with pytest.raises(RuntimeError) as error:
        unhooked(peer, bootstrap)
    assert text in str(error.value)


@pytest.mark.parametrize("layout", ["fp8", "fp8_block_scale", "fp4"])
def test_a_stock_prefill_server_is_refused(manager_of, bootstrap, layout):
    manager_of("prefill", device_pool("bf16"), layout=None)
    text = rf"stores SGLang's own rows \(bfloat16\), this decode server rows of layout {layout} \("
    with pytest.raises(RuntimeError, match=text):
        manager_of("decode", pool_of(layout)).try_ensure_parallel_info(bootstrap)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_peer_that_says_nothing_of_its_rows(manager_of, bootstrap, layout):
    """SGLang lets it pass, as it does for a decode server with its own rows."""
    manager_of("prefill", device_pool("bf16"), layout=None, says_dtype=False)
    peer = manager_of("decode", pool_of(layout))
    if layout == "bf16":
        assert peer.try_ensure_parallel_info(bootstrap)
        return
    text = f"does not say what rows it stores, this decode server rows of layout {layout} .*--kv-cache-layout"
    for _ in range(2):
        with pytest.raises(RuntimeError, match=text):
            peer.try_ensure_parallel_info(bootstrap)


@pytest.mark.parametrize("sides", [("bf16", None), (None, "bf16"), (None, None)])
def test_bf16_interoperates_with_stock(manager_of, bootstrap, sides):
    manager_of("prefill", pool_of("bf16"), layout=sides[0])
    peer = manager_of("decode", pool_of("bf16"), layout=sides[1])
    assert unhooked(peer, bootstrap)
    peer.prefill_info_table.clear()
    assert peer.try_ensure_parallel_info(bootstrap)


def test_another_version_of_the_rows_is_refused(manager_of, bootstrap, monkeypatch):
    from sgl_kvpool import layout

    with monkeypatch.context() as other:
        other.setattr(layout, "FORMAT_VERSION", layout.FORMAT_VERSION + 1)
        manager_of("prefill", pool_of("fp4"))
    with pytest.raises(RuntimeError, match=r"b416-v2\), this.*b416-v1\)\. Serve the same.*release of sgl"):
        manager_of("decode", pool_of("fp4")).try_ensure_parallel_info(bootstrap)


def test_another_geometry_is_refused(manager_of, bootstrap):
    manager_of("prefill", pool_of("fp4", kv_lora_rank=256))
    with pytest.raises(RuntimeError, match=r"fp4-r256-p64-.*fp4-r512-p64-.*Serve the same model"):
        manager_of("decode", pool_of("fp4")).try_ensure_parallel_info(bootstrap)


@pytest.mark.parametrize(
    ("prefill", "decode", "equal"),
    [({5: 0.5}, {5: 0.5}, True), ({5: 0.5}, {6: 0.5}, False), ({5: 0.5}, {}, False), ({}, {5: 1.0}, True)],
)
def test_k_scales_are_compared(manager_of, bootstrap, prefill, decode, equal):
    """Rows of fp8 are divided by them, and the peer multiplies by its own."""
    manager_of("prefill", pool_of("fp8", k_scales=prefill))
    peer = manager_of("decode", pool_of("fp8", k_scales=decode))
    if equal:
        assert peer.try_ensure_parallel_info(bootstrap)
        return
    with pytest.raises(RuntimeError, match=r"b576-v1-k[0-9a-f]{8}\).*Serve the same model and checkpoint"):
        peer.try_ensure_parallel_info(bootstrap)


def test_k_scales_of_a_pipeline_stage_cannot_be_compared(published):
    from sglang.srt.runtime_context import get_parallel

    from sgl_kvpool.sglang_plugin.disaggregation import rows_name

    scaled = device_pool("fp8", k_scales={START: 0.5})
    with get_parallel().override(pp_size=2):
        assert rows_name([device_pool("fp8")]) == "fp8-r512-p64-b576-v1"
        with pytest.raises(ValueError, match=r"--pp-size 2 does not .*-layout fp8 and .*-size 1, or"):
            rows_name([scaled])


def test_sglangs_other_errors_are_left_alone(manager_of, bootstrap):
    manager_of("prefill", pool_of("fp4", page_size=2))
    with pytest.raises(RuntimeError, match=r"^Page size mismatch: .*same --page-size value\.$"):
        manager_of("decode", pool_of("fp4")).try_ensure_parallel_info(bootstrap)


def test_a_mismatch_of_stock_rows_keeps_sglangs_error(manager_of, bootstrap):
    manager_of("prefill", device_pool("fp8"), layout=None)
    with pytest.raises(RuntimeError, match=r"^KV cache dtype mismatch: .*same --kv-cache-dtype value\.$"):
        manager_of("decode", device_pool("bf16"), layout=None).try_ensure_parallel_info(bootstrap)


# -------------------------------------------------------------------- drafts


def test_a_draft_with_the_targets_rows_adds_nothing(manager_of):
    manager = manager_of("prefill", pool_of("fp8"), draft=pool_of("fp8", layers=1))
    assert manager.kv_args.num_draft_entries == 1
    assert len(manager.kv_args.kv_data_ptrs) == LAYERS + 1
    assert manager.kv_cache_dtype_str == STRINGS["fp8"]


def test_a_draft_with_other_rows_is_compared_too(manager_of, bootstrap):
    other = pool_of("fp8", layers=1, kv_lora_rank=256)
    manager = manager_of("prefill", pool_of("fp8"), draft=other)
    assert manager.kv_cache_dtype_str == STRINGS["fp8"] + "+fp8-r256-p64-b320-v1"
    peer = manager_of("decode", pool_of("fp8"), draft=pool_of("fp8", layers=1))
    with pytest.raises(RuntimeError, match=r"b320-v1\), this decode server rows of layout fp8 \("):
        peer.try_ensure_parallel_info(bootstrap)


def test_a_draft_of_another_kind_keeps_its_pool(manager_of):
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    draft = MHATokenToKVPool(
        size=16, page_size=4, dtype=torch.float8_e4m3fn, head_num=1, head_dim=8, layer_num=1, device="cpu",
        enable_memory_saver=False,
    )  # fmt: skip
    manager = manager_of("prefill", pool_of("fp8"), draft=draft)
    assert manager.kv_args.num_draft_entries == 2
    assert manager.kv_cache_dtype_str == STRINGS["fp8"]


def test_a_pool_that_is_not_ours_is_noticed(manager_of):
    with pytest.raises(RuntimeError, match=r"buffer 0 of 3 .* pages of 1664 bytes, and no pool .*report the"):
        manager_of("prefill", device_pool("fp4"))  # which nobody remembered
    with pytest.raises(RuntimeError, match="buffer 0 of 3"):
        manager_of("decode", device_pool("bf16"), layout="fp4", draft=pool_of("fp4", layers=1))


# -------------------------------------------------------------------- the bytes


def send(source, target, source_pages, target_pages):
    """Copy pages as SGLang's engines do for MLA: its pairs of buffers, its runs of pages, our memmove."""
    from sglang.srt.disaggregation.common.utils import group_concurrent_contiguous

    pages = (np.array(numbers, dtype=np.int32) for numbers in (source_pages, target_pages))
    runs = list(zip(*group_concurrent_contiguous(*pages), strict=True))
    ours, theirs, layers = source.get_mla_kv_ptrs_with_pp(
        source.kv_args.kv_data_ptrs, target.kv_args.kv_data_ptrs
    )
    assert len(ours) == len(theirs) == layers
    for src, dst, page_bytes in zip(ours, theirs, source.kv_args.kv_item_lens, strict=True):
        for first, second in runs:
            size = page_bytes * len(first)
            ctypes.memmove(dst + int(second[0]) * page_bytes, src + int(first[0]) * page_bytes, size)
    return len(runs)


@pytest.mark.parametrize("page_size", [1, 2, 61, 64])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_arrive_byte_for_byte(manager_of, layout, page_size):
    there, here = (pool_of(layout, page_size=page_size, pages=pages) for pages in (9, 13))
    source, target = manager_of("prefill", there), manager_of("decode", here)
    page_bytes = page_size * ROW_BYTES[layout]
    for manager, pages in ((source, 9), (target, 13)):
        assert manager.kv_args.kv_item_lens == [page_bytes] * LAYERS
        assert manager.kv_args.kv_data_lens == [page_bytes * pages] * LAYERS
    fill(there, seed=page_size)
    before = [layer.copy() for layer in rows(there)]
    for layer in rows(here):
        layer[...] = GUARD
    from_pages, to_pages = [1, 2, 3, 8, 5, 7], [10, 11, 1, 2, 12, 4]
    assert send(source, target, from_pages, to_pages) == 5  # pages that follow each other on both sides
    for layer, sent, arrived in zip(range(LAYERS), before, rows(here), strict=True):
        expected = np.full_like(arrived, GUARD)
        expected[to_pages] = sent[from_pages]
        assert np.array_equal(arrived, expected), layer
        assert np.array_equal(rows(there)[layer], sent)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_stages_of_a_prefill_server_fill_the_layers_of_a_decode_server(manager_of, layout):
    here = pool_of(layout, start_layer=0)
    for layer in rows(here):
        layer[...] = GUARD
    target, expected = manager_of("decode", here), [layer.copy() for layer in rows(here)]
    for start, layers in ((0, 2), (2, 1)):
        there = pool_of(layout, start_layer=start, layers=layers)
        fill(there, seed=start)
        source = manager_of("prefill", there)
        assert source.kv_cache_dtype_str == target.kv_cache_dtype_str
        send(source, target, [3], [1])
        for number, layer in enumerate(rows(there)):
            expected[start + number][1] = layer[3]
    assert all(map(np.array_equal, rows(here), expected))


# -------------------------------------------------------------------- models with sparse attention

#: The scaled rows are shown to SGLang as another dtype than in dense pools, and raw rows as the same one.
DSA_STRINGS = {**STRINGS, "fp8_block_scale": "fp8_e4m3+kvpool:fp8_block_scale-r512-p64-b656-v1"}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sparse_pools_name_their_rows_and_send_index_keys_beside_them(manager_of, layout):
    """Index keys are SGLang's own, a state of its own, which is none of the pages of rows."""
    pool = pool_of(layout, make=dsa_pool, skip_topk_layers=[False, True, False])
    manager = manager_of("prefill", pool)
    args = manager.kv_args
    assert manager.kv_cache_dtype_str == DSA_STRINGS[layout]
    assert args.kv_data_ptrs == [layer.data_ptr() for layer in pool.kv_buffer]
    assert args.kv_item_lens == [PAGE * row_bytes(layout)] * LAYERS
    assert [kind.value for kind in args.state_types] == ["dsa"]
    assert args.state_data_ptrs == [[pages.data_ptr() for pages in pool.index_k_with_scale_buffer]]
    assert args.state_item_lens == [[INDEX_PAGE_BYTES, 0, INDEX_PAGE_BYTES]]


@pytest.mark.parametrize(("prefill", "decode"), itertools.product(LAYOUTS, LAYOUTS))
def test_all_pairs_of_layouts_of_sparse_models(manager_of, bootstrap, prefill, decode):
    manager_of("prefill", pool_of(prefill, make=dsa_pool))
    peer = manager_of("decode", pool_of(decode, make=dsa_pool))
    if prefill == decode:
        assert peer.try_ensure_parallel_info(bootstrap)
        return
    text = "KV cache layout mismatch: .*"
    text += ", .*".join(re.escape(f"({DSA_STRINGS[layout]})") for layout in (prefill, decode))
    with pytest.raises(RuntimeError, match=f"{text}.*same --kv-cache-layout"):
        peer.try_ensure_parallel_info(bootstrap)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_stock_peer_of_a_sparse_model(manager_of, bootstrap, layout):
    """It says `fp8_e4m3` of raw and of scaled rows, so neither is taken for ours."""
    stock = stock_pool("bf16" if layout in ("bf16", "fp4") else layout)
    manager_of("prefill", stock, layout=None)
    peer = manager_of("decode", pool_of(layout, make=dsa_pool))
    if layout == "bf16":
        assert peer.try_ensure_parallel_info(bootstrap)
        return
    with pytest.raises(RuntimeError, match=f"stores SGLang's own rows .* rows of layout {layout} "):
        peer.try_ensure_parallel_info(bootstrap)


def test_rows_of_264_bytes_are_not_those_of_a_dense_pool(manager_of, bootstrap):
    """Which pads them to 272; SGLang is shown another dtype too."""
    manager_of("prefill", pool_of("fp8_block_scale", page_size=PAGE, kv_lora_rank=256, qk_rope_head_dim=0))
    peer = manager_of("decode", pool_of("fp8_block_scale", make=dsa_pool, rank=256, rope=0))
    assert peer.kv_cache_dtype_str == "fp8_e4m3+kvpool:fp8_block_scale-r256-p0-b264-v1"
    with pytest.raises(RuntimeError, match=r"-b272-v1\), .*-b264-v1\)"):
        peer.try_ensure_parallel_info(bootstrap)


# -------------------------------------------------------------------- SGLang's engines


@pytest.mark.parametrize("engine", ["mooncake", "nixl", "mori", "ascend"])
def test_every_transfer_engines_manager_is_hooked(engine):
    """By its source: mori's wants a library that is not installed here."""
    from sglang.srt.disaggregation import common

    source = (Path(common.__file__).parent.parent / engine / "conn.py").read_text()
    (bases,) = re.findall(r"^class \w+KVManager\((.*)\):$", source, re.MULTILINE)
    assert bases.split(", ")[-1] == ("MooncakeKVManager" if engine == "ascend" else "CommonKVManager")
    assert "super().__init__(args, disaggregation_mode, server_args, is_mla_backend)" in source
    assert "def try_ensure_parallel_info" not in source
    assert "def register_to_bootstrap" not in source


def test_the_fake_engine_has_no_peer():
    """Its manager is another class: it transfers nothing."""
    from sglang.srt.disaggregation.fake.conn import FakeKVManager

    assert not hasattr(FakeKVManager, "try_ensure_parallel_info")
