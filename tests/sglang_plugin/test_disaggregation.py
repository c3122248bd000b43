"""Prefill and decode servers: what SGLang's own queues describe to peers, and what peers compare.

Of managers.py's managers and bootstrap server, only the engines' copy is replaced, by `ctypes.memmove`.
"""

import ctypes
import inspect
import re
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from codec_oracle import LAYOUTS, NARROW
from managers import PAIRS, STRINGS, pool_of
from pools import GUARD, LAYERS, START, device_pool, fill, rows
from sglang.srt.disaggregation import common
from sglang.srt.disaggregation.common.utils import group_concurrent_contiguous
from sglang.srt.disaggregation.utils import TransferBackend, kv_layout_signature
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.runtime_context import get_parallel, get_server_args
from shown import SHOWN

from sgl_kvpool.srt.peers import rows_name

# -------------------------------------------------------------------- the handshake


@pytest.mark.parametrize("mode", ["prefill", "decode"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_rows_are_in_what_peers_compare(manager_of, mode, layout):
    manager = manager_of(mode, pool_of(layout))
    assert manager.kv_cache_dtype_str == manager.kv_args.kv_cache_dtype_str == STRINGS[layout]
    # A second manager of the same arguments has the same name.
    type(manager)(manager.kv_args, manager.disaggregation_mode, get_server_args(), True)
    assert manager.kv_args.kv_cache_dtype_str == STRINGS[layout]
    # The signature is part of the checksums of --disaggregation-enable-kv-checksum.
    signature = kv_layout_signature(manager.kv_args)
    manager.kv_args.kv_cache_dtype_str = {**SHOWN, "bf16": "auto"}[layout]
    assert (kv_layout_signature(manager.kv_args) == signature) == (layout == "bf16")


@pytest.mark.parametrize(("prefill", "decode"), PAIRS)
def test_all_pairs_of_layouts(manager_of, bootstrap, prefill, decode):
    manager_of("prefill", pool_of(prefill))
    peer = manager_of("decode", pool_of(decode))
    if prefill == decode:
        assert peer.try_ensure_parallel_info(bootstrap)
        assert peer.prefill_info_table[bootstrap].kv_cache_dtype == STRINGS[prefill]
        return
    shown = {x: f"rows of layout {x} ({STRINGS[x]})" for x in NARROW}
    theirs, ours = (shown.get(x, "SGLang's own rows (auto)") for x in (prefill, decode))
    with pytest.raises(RuntimeError) as error:
        peer.try_ensure_parallel_info(bootstrap)
    assert str(error.value) == (
        f"KV cache layout mismatch: the prefill server at {bootstrap} stores {theirs}, and this decode "
        f"server stores {ours}. Start both with the same --kv-cache-layout, model, checkpoint, draft "
        "model (--speculative-algorithm) and release of sgl-kvpool; bf16 also works with servers that do not "
        "have it."
    )
    assert bootstrap not in peer.prefill_info_table


def unhooked(peer, bootstrap):
    """SGLang's own `try_ensure_parallel_info`, as on a server without the plugin."""
    return inspect.unwrap(type(peer).try_ensure_parallel_info)(peer, bootstrap)


@pytest.mark.parametrize("layout", NARROW)
def test_a_stock_prefill_server_is_refused(manager_of, bootstrap, layout):
    manager_of("prefill", device_pool("bf16"), layout=None)
    text = rf"stores SGLang's own rows \(auto\), and this decode server stores rows of layout {layout} \("
    with pytest.raises(RuntimeError, match=text):
        manager_of("decode", pool_of(layout)).try_ensure_parallel_info(bootstrap)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_peer_that_says_nothing_of_its_rows(manager_of, bootstrap, layout):
    """SGLang accepts such a peer; we accept it only for a decode server with SGLang's own rows."""
    manager_of("prefill", device_pool("bf16"), layout=None, says_dtype=False)
    peer = manager_of("decode", pool_of(layout))
    if layout == "bf16":
        assert peer.try_ensure_parallel_info(bootstrap)
        return
    text = f"stores rows that it does not report, .* stores rows of layout {layout} .*--kv-cache-layout"
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


@pytest.mark.parametrize(
    ("layout", "prefill", "decode", "fits"),
    [
        *((layout, dtype, "auto", True) for layout in (None, "bf16") for dtype in ("bfloat16", "bf16")),
        (None, "bf16", "bf16", True),
        (None, "auto", "bfloat16", False),  # as between servers of SGLang; the error names the argument
        (None, "auto", "float16", False),  # a float16 model, whose rows `auto` would be
    ],
)
def test_names_of_bf16_rows(manager_of, bootstrap, layout, prefill, decode, fits):
    manager_of("prefill", pool_of("bf16"), layout=layout, kv_cache_dtype=prefill)
    of_model = {"model_dtype": torch.float16} if decode == "float16" else {"kv_cache_dtype": decode}
    peer = manager_of("decode", pool_of("bf16"), **of_model)
    text = "has kv_cache_dtype=bfloat16.*must use the same --kv-cache-dtype"
    with nullcontext() if fits else pytest.raises(RuntimeError, match=text):
        assert peer.try_ensure_parallel_info(bootstrap)


def test_another_version_of_the_rows_is_refused(manager_of, bootstrap, monkeypatch):
    from sgl_kvpool import layout

    with monkeypatch.context() as other:
        other.setattr(layout, "FORMAT_VERSION", layout.FORMAT_VERSION + 1)
        manager_of("prefill", pool_of("fp4"))
    text = r"b416-v2\), and this.*b416-v1\)\. Start both with the same.*release of"
    with pytest.raises(RuntimeError, match=text):
        manager_of("decode", pool_of("fp4")).try_ensure_parallel_info(bootstrap)


def test_another_geometry_is_refused(manager_of, bootstrap):
    manager_of("prefill", pool_of("fp4", kv_lora_rank=256))
    with pytest.raises(RuntimeError, match=r"fp4-r256-p64-.*fp4-r512-p64-.*Start both with the same .*model"):
        manager_of("decode", pool_of("fp4")).try_ensure_parallel_info(bootstrap)


@pytest.mark.parametrize(
    ("prefill", "decode", "equal"),
    [({5: 0.5}, {5: 0.5}, True), ({5: 0.5}, {6: 0.5}, False), ({5: 0.5}, {}, False), ({}, {5: 1.0}, True)],
)
def test_k_scales_are_compared(manager_of, bootstrap, prefill, decode, equal):
    """A server divides fp8 rows by its k_scales, and its peer multiplies by the peer's own."""
    manager_of("prefill", pool_of("fp8", k_scales=prefill))
    peer = manager_of("decode", pool_of("fp8", k_scales=decode))
    text = r"b576-v1-k[0-9a-f]{8}\).*Start both with the same .*model, checkpoint"
    with nullcontext() if equal else pytest.raises(RuntimeError, match=text):
        assert peer.try_ensure_parallel_info(bootstrap)


def test_k_scales_of_a_pipeline_stage_cannot_be_compared(published):
    scaled = device_pool("fp8", k_scales={START: 0.5})
    with get_parallel().override(pp_size=2):
        assert rows_name([device_pool("fp8")]) == "fp8-r512-p64-b576-v1"
        with pytest.raises(ValueError, match=r"--pp-size 2 does not .*-layout fp8 and .*-size 1, or"):
            rows_name([scaled])


# -------------------------------------------------------------------- drafts


def test_a_draft_with_the_targets_rows(manager_of, bootstrap):
    manager = manager_of("prefill", pool_of("fp8"), draft=pool_of("fp8", layers=1))
    assert manager.kv_args.num_draft_entries == 1
    assert len(manager.kv_args.kv_data_ptrs) == LAYERS + 1
    assert manager.kv_cache_dtype_str == STRINGS["fp8"] + "+draft"
    peer = manager_of("decode", pool_of("fp8"), draft=pool_of("fp8", layers=1))
    assert peer.try_ensure_parallel_info(bootstrap)


@pytest.mark.parametrize("with_draft", ["prefill", "decode"])
@pytest.mark.parametrize("layout", ["fp8", "fp4"])
def test_a_draft_of_one_server_only_is_refused(manager_of, bootstrap, layout, with_draft):
    """SGLang would send a prefill server's draft rows to the last layer of the decode server's target."""
    drafts = {with_draft: pool_of(layout, layers=1)}
    sends = manager_of("prefill", pool_of(layout), draft=drafts.get("prefill"))
    peer = manager_of("decode", pool_of(layout), draft=drafts.get("decode"))
    if with_draft == "prefill":
        theirs = peer.kv_args.kv_data_ptrs
        sources, targets, _ = sends.get_mla_kv_ptrs_with_pp(sends.kv_args.kv_data_ptrs, theirs)
        assert (sources[-1], targets[-1]) == (drafts["prefill"].get_contiguous_buf_infos()[0][0], theirs[-1])
    with pytest.raises(RuntimeError, match=r"-v1\+draft\).*draft model \(--speculative-algo"):
        peer.try_ensure_parallel_info(bootstrap)


def test_a_draft_with_other_rows_is_compared_too(manager_of, bootstrap):
    other = pool_of("fp8", layers=1, kv_lora_rank=256)
    manager = manager_of("prefill", pool_of("fp8"), draft=other)
    assert manager.kv_cache_dtype_str == STRINGS["fp8"] + "+fp8-r256-p64-b320-v1"
    peer = manager_of("decode", pool_of("fp8"), draft=pool_of("fp8", layers=1))
    with pytest.raises(RuntimeError, match=r"b320-v1\), and this decode server stores rows of layout fp8 \("):
        peer.try_ensure_parallel_info(bootstrap)


def test_a_draft_of_another_kind_keeps_its_pool(manager_of):
    draft = MHATokenToKVPool(
        size=16, page_size=4, dtype=torch.float8_e4m3fn, head_num=1, head_dim=8, layer_num=1, device="cpu",
        enable_memory_saver=False,
    )  # fmt: skip
    manager = manager_of("prefill", pool_of("fp8"), draft=draft)
    assert manager.kv_args.num_draft_entries == 2
    assert manager.kv_cache_dtype_str == STRINGS["fp8"] + "+draft"


def test_a_pool_that_is_not_ours_is_noticed(manager_of):
    with pytest.raises(RuntimeError, match=r"buffer 1 of 3 .* pages of 1664 bytes, and no pool .*report the"):
        manager_of("prefill", device_pool("fp4"))  # not built through our hook
    with pytest.raises(RuntimeError, match="buffer 1 of 4"):
        manager_of("decode", device_pool("bf16"), layout="fp4", draft=pool_of("fp4", layers=1))


# -------------------------------------------------------------------- the bytes


def send(source, target, source_pages, target_pages):
    """Copy pages as SGLang's engines do for MLA: its pairs of buffers, its runs of pages, our memmove."""
    pages = (np.array(numbers, dtype=np.int32) for numbers in (source_pages, target_pages))
    runs = list(zip(*group_concurrent_contiguous(*pages), strict=True))
    pointers = (side.kv_args.kv_data_ptrs for side in (source, target))
    ours, theirs, layers = source.get_mla_kv_ptrs_with_pp(*pointers)
    assert len(ours) == len(theirs) == layers
    for src, dst, page_bytes in zip(ours, theirs, source.kv_args.kv_item_lens, strict=True):
        for first, second in runs:
            size = page_bytes * len(first)
            ctypes.memmove(dst + int(second[0]) * page_bytes, src + int(first[0]) * page_bytes, size)
    return len(runs)


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


# -------------------------------------------------------------------- SGLang's engines

#: Engines that transfer; `fake` transfers nothing. SGLang's list is compared with them.
ENGINES = ["mooncake", "nixl", "mori", "ascend"]


def test_these_are_sglangs_engines():
    assert {backend.value for backend in TransferBackend} == {*ENGINES, "fake"}


@pytest.mark.parametrize("engine", ENGINES)
def test_every_transfer_engines_manager_is_hooked(engine):
    """Checked in the source, because mori's manager imports a library that is not installed here."""
    source = (Path(common.__file__).parent.parent / engine / "conn.py").read_text()
    (bases,) = re.findall(r"^class \w+KVManager\((.*)\):$", source, re.MULTILINE)
    assert bases.split(", ")[-1] == ("MooncakeKVManager" if engine == "ascend" else "CommonKVManager")
    assert "super().__init__(args, disaggregation_mode, server_args, is_mla_backend)" in source
    assert "def try_ensure_parallel_info" not in source
    assert "def register_to_bootstrap" not in source
