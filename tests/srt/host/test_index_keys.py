"""Index keys of sparse models in host pages: order of loads, stores, damage, names of pages."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from host_tier import backup, host_pool, load, page_memory
from pools import GUARD, device_pool, dsa_pool, everything, fill, guard
from sglang.srt.environ import envs
from sglang.srt.mem_cache.hybrid_cache.host_pool_config import prepare_host_pool_config
from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import build_host_pool_group
from sglang.srt.mem_cache.pool_host import base
from test_controller import broken
from test_every_model import family
from test_hybrid_stores import files, stored

from sgl_kvpool.demo.cluster.mooncake_store import MooncakeStore
from sgl_kvpool.srt.host import storage_mixin
from sgl_kvpool.srt.host.memory import HostTierTooLarge
from sgl_kvpool.srt.pool.regions import canonical_view
from sgl_kvpool.transfer.host_options import HostTierOptions

pytestmark = pytest.mark.usefixtures("no_reserve", "published")
PAGE, KEY_BYTES = 64, 64 * 132
#: GLM-5.2's pattern: layers that select tokens (False), and layers that use the list of the layer before.
SKIPPED = [False, False, False, True, True, True, False]


def sparse(layout="fp4", layers=7, pages=6, **extra):
    skipped = {"skip_topk_layers": SKIPPED} if layers == 7 else {}
    return dsa_pool(layout, start_layer=0, layer_num=layers, size=pages * PAGE, **skipped, **extra)


def dense(layout, **extra):
    return device_pool(layout, page_size=PAGE, pages=7, layers=7, start_layer=0, **extra)


def parts_of(target, draft):
    """All device bytes by (part, layer), the draft's layer as layer 7."""
    return everything(target) | {(part, 7): data for (part, _), data in everything(draft).items()}


@pytest.mark.parametrize("label", ["page_first", "page_first_direct"])
def test_a_layer_arrives_with_its_index_keys(label):
    """SGLang's event of a layer covers both; after call l exactly the bytes of layer l have changed."""
    target, draft = sparse(), sparse(layers=1)
    tier, parts = host_pool(target, label, draft_pools=[draft]), parts_of(target, draft)
    keyed = [layer for layer in range(8) if len(parts["index", layer])]
    assert keyed == [0, 1, 2, 6, 7]
    for place, data in enumerate(parts.values()):
        data[...] = place + 1
    assert tier.page_bytes == 8 * PAGE * 416 + 5 * KEY_BYTES
    backup(tier, [0, 2], [3, 5])
    memory = page_memory(tier)[[0, 2]]
    keys = memory[:, 8 * PAGE * 416 : tier.page_bytes].reshape(2, 5, KEY_BYTES)
    places = [*parts]
    assert (keys == [[places.index(("index", layer)) + 1] for layer in keyed]).all()
    assert (page_memory(tier)[[1, 3]] == GUARD).all()
    for data in parts.values():
        data[...] = GUARD
    for layer in range(8):
        load(tier, [2, 0], [1, 4], layers=[layer], is_draft=layer == 7)
        for place, (name, data) in enumerate(parts.items()):
            arrived = name[1] <= layer
            for page in range(len(data)):
                expected = place + 1 if arrived and page in (1, 4) else GUARD
                assert (data[page] == expected).all(), (layer, name, page)


@pytest.mark.parametrize(
    ("target", "layout", "host"),
    [(sparse, "bf16", "same"), (sparse, "bf16", "fp4"), (sparse, "fp4", "same"), (dense, "fp4", "same")],
)
def test_a_page_has_all_bytes_of_the_pools(target, layout, host):
    """SGLang compares what target and draft declare, and neither declares index keys."""
    options = {"host_tier": HostTierOptions(layout=host)}
    pools = [target(layout, **options), sparse(layout, layers=1, **options)]
    content_bytes = sum(group.bytes_per_page for pool in pools for group in canonical_view(pool).groups)
    narrower = 8 * PAGE * (1152 - 416) if host == "fp4" and layout == "bf16" else 0
    assert host_pool(pools[0], draft_pools=pools[1:]).page_bytes == content_bytes - narrower


@pytest.mark.parametrize(
    ("layout", "stock", "pools"),
    [
        ("bf16", True, {"kv": "MLATokenToKVPoolHost", "indexer": "DSAIndexerPoolHost"}),
        ("fp8_block_scale", True, {"kv": "MLATokenToKVPoolHost", "indexer": "DSAIndexerPoolHost"}),
        ("fp4", False, {"kv": "HierarchicalMLAHostPool"}),
    ],
)
def test_sglangs_own_pools_keep_its_tier(host_server, kernels, layout, stock, pools):
    """Rows of 1152 and of 656 bytes without a layout; `test_dsa_pool.py` has layouts without our tier."""
    given = {"hicache_mem_layout": "page_first", "hicache_io_backend": "kernel"}
    host_server(page_size=PAGE, hicache_ratio=2.0, **given)
    pool = sparse(layout, stock=stock)
    config = prepare_host_pool_config(
        decls=pool.host_pool_decls(), full_layer_mapping={i: i for i in range(7)}, transfer_layer_id_max=7,
        transfer_page_size=PAGE,
    )  # fmt: skip
    entries = build_host_pool_group(config=config).entry_map
    assert {name.value: type(entry.host_pool).__name__ for name, entry in entries.items()} == pools
    if stock:
        keys = entries["indexer"].host_pool
        assert keys.size_per_token * PAGE == 4 * KEY_BYTES


def test_flipped_bits_in_mooncake(tmp_path):
    """Mooncake's own programs and client, in a process that finds its libraries."""
    for module in ("mooncake", "nixl_cu13"):
        pytest.importorskip(module)
    script = Path(__file__).with_name("mooncake_pages.py")
    with MooncakeStore(tmp_path) as store:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", script],
            env=os.environ | store.environment, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
    assert "2 passed" in done.stdout, done.stdout + done.stderr


def test_a_backup_without_index_keys_is_lost(model_of, store, failures, monkeypatch):
    """Rows arrived, keys did not: the page is neither loaded nor stored."""
    model = model_of("DSA", page_size=PAGE, pages=16, store=store)
    (keys,) = model.tier._channels.to_host[1:]
    broken([keys], monkeypatch)
    _, one, _, _ = family(PAGE)
    stored(model, one)
    model.evict()
    assert model.check(one) == 0
    assert failures() == {"backup": 1, "backup_lost": 1, "load_pages": 1, "page_write": 1}
    assert files(store, False) == []


def test_index_keys_of_a_draft_with_a_tier_of_its_own_have_room(monkeypatch):
    """SGLang allocates them behind our pool; its error would name no argument."""
    tokens = 10 * PAGE
    arguments = {"with_checksum": False, "host_token_capacity": tokens}
    monkeypatch.setattr(base, "available_host_memory_bytes", lambda **_: tokens * (416 + 132))
    assert host_pool(sparse(layers=1), **arguments).page_bytes == PAGE * 416
    monkeypatch.setattr(base, "available_host_memory_bytes", lambda **_: tokens * (416 + 132) - 1)
    text = f"for {tokens} tokens .*smaller --hicache-ratio or --hicache-"
    with pytest.raises(HostTierTooLarge, match=text):
        host_pool(sparse(layers=1), **arguments)


def test_names_of_pages(monkeypatch):
    """Dense pages keep their names; others have the layers with keys and whether SGLang rotated the keys."""
    dense = "fp4-r512-p64-b416-v1-host_fp4-l0.7.0-t64-s2"

    def tag(skipped=SKIPPED):
        pool = dsa_pool("fp4", start_layer=0, layer_num=7, skip_topk_layers=skipped)
        return host_pool(pool).storage_format_tag

    found = [tag()]
    monkeypatch.setattr(storage_mixin, "is_cuda", lambda: True)
    found.append(tag())
    with envs.SGLANG_DISABLE_DSA_INDEXER_FUSION.override(True):
        assert tag() == found[0]
    found.append(tag(SKIPPED[::-1]))
    assert len({*found}) == 3
    assert all(each.startswith(f"{dense}-i4x8448.") for each in found)
    assert tag([True] * 7) == dense


@pytest.mark.parametrize("host", ["same", "fp4"])
def test_pooled_index_keys(host):
    """GLM-5.3-Flash: a page of 256 tokens has 64 keys; tails of requests stay on the device."""
    pool = dsa_pool(
        "bf16", start_layer=0, layer_num=2, page_size=256, size=1024, index_kpool=4,
        index_kpool_compress=True, max_running_requests=2, host_tier=HostTierOptions(layout=host),
    )  # fmt: skip
    tier, parts = host_pool(pool), everything(pool)
    was = fill(pool, 5)
    backup(tier, [1], [3])
    guard(pool)
    load(tier, [1], [2], layers=range(2))
    for name in [("index", 0), ("index", 1)]:
        assert np.array_equal(parts[name][2], was[name][3])
        assert (np.delete(parts[name], 2, axis=0) == GUARD).all()
