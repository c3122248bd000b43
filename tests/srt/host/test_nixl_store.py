"""SGLang's NIXL store with real POSIX files under our host tier, with and without O_DIRECT."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from direct_stores import GOT, KEYS, PUT, filled, get, put
from host_tier import tier_of
from model_kinds import NIXL_POSIX
from pools import GUARD, LAYERS


@pytest.fixture
def nixl_of(direct, tmp_path, monkeypatch):
    """A function that builds a controller over SGLang's NIXL store of POSIX files, and the store's folder."""
    pytest.importorskip("nixl._api", reason="needs nixl and nixl-cu13")
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
    from sglang.srt.mem_cache.storage.nixl.hicache_nixl import HiCacheNixl

    folder = tmp_path / "nixl"
    monkeypatch.setenv("SGLANG_HICACHE_NIXL_BACKEND_STORAGE_DIR", str(folder))

    def build(layout, direct_io, page_size=64, layers=LAYERS):
        controller = direct(layout, page_size, layers=layers)
        config = HiCacheStorageConfig(
            tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, is_mla_model=True,
            enable_storage_metrics=False, is_page_first_layout=True,
            model_name=f"model-{tier_of(controller).storage_format_tag}",
            extra_config=json.loads(NIXL_POSIX) | {"use_direct_io": direct_io},
        )  # fmt: skip
        controller.storage_backend = HiCacheNixl(config)
        controller.storage_backend.register_mem_pool_host(tier_of(controller))
        return controller

    return build, folder


def files(folder):
    """The file of each key."""
    found = [Path(base, name) for base, _, names in os.walk(folder) for name in names]
    return {path.name[:1]: path for path in found if path.name[:64] in KEYS}


#: Includes DeepSeek-V3's 61 layers, whose fp4 rows of a page have 396.5 times 4096 bytes.
NIXL_CASES = [
    *(pytest.param("fp4", io, 64, LAYERS, id=f"fp4-{io}") for io in (True, False)),
    *(pytest.param("fp8", io, 64, LAYERS, id=f"fp8-{io}") for io in (True, False)),
    pytest.param("fp8_block_scale", True, 64, 61, id="fp8_block_scale-61-layers"),
    pytest.param("fp4", True, 64, 61, id="fp4-61-layers"),
    pytest.param("fp4", True, 61, LAYERS, id="fp4-pages-of-61"),
]


@pytest.mark.parametrize(("layout", "direct_io", "page_size", "layers"), NIXL_CASES)
def test_nixl_round_trip(nixl_of, failures, layout, direct_io, page_size, layers):
    """O_DIRECT is NIXL's default: SGLang copies pages whose size is not a multiple of 4096, such as fp8's."""
    build, folder = nixl_of
    first = build(layout, direct_io, page_size, layers)
    tier = tier_of(first)
    was = filled(tier)
    assert put(first)
    copies = direct_io and not tier.is_stride_page_aligned(4096)
    assert first.storage_backend.is_zero_copy == (not copies)
    fmt = tier.page_format
    sizes = {path.stat().st_size for path in files(folder).values()}
    assert (len(files(folder)), sizes) == (4, {fmt.copied_bytes if copies else fmt.size_bytes})
    hits, memory = get(again := build(layout, direct_io, page_size, layers))
    assert hits == 4
    assert np.array_equal(memory[GOT, :-16], was[PUT, :-16])
    assert (np.delete(memory, GOT, axis=0) == GUARD).all()
    assert again.storage_backend.batch_exists(KEYS) == 4
    assert failures() == {}
