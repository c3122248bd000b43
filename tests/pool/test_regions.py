"""`CanonicalKVCaches.from_pool` on SGLang's real pools, each kind, against their own tensors."""

import itertools
import subprocess
import sys

import numpy as np
import pytest
import torch

from sgl_kvpool.canonical import CanonicalKVCaches, IndexedBy
from sgl_kvpool.page_copy import copy_pages

pytestmark = pytest.mark.usefixtures("published")

MLA = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "device": "cpu", "enable_memory_saver": False}


def mha(page_size=4, size=12, heads=3, dim=8, v_dim=6, layers=2, **extra):
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    arguments = {"v_head_dim": v_dim, "start_layer": 5, **extra}
    return MHATokenToKVPool(size, page_size, torch.bfloat16, heads, dim, layers, "cpu", False, **arguments)


def mla(dtype=torch.bfloat16, page_size=4, size=12, kind="MLATokenToKVPool", layers=3):
    from sglang.srt.mem_cache import memory_pool

    pool = getattr(memory_pool, kind)
    return pool(size=size, page_size=page_size, dtype=dtype, layer_num=layers, start_layer=5, **MLA)


def ours(layout, arrangement, page_size=4, size=12, **extra):
    from sgl_kvpool.layout import MLAKVCacheLayout
    from sgl_kvpool.pool import LayoutMLATokenToKVPool

    layout = MLAKVCacheLayout(layout)
    shown = {"bfloat16": torch.bfloat16, "fp8_e4m3": torch.float8_e4m3fn}[layout.sglang_kv_cache_dtype()]
    return LayoutMLATokenToKVPool(
        size=size, page_size=page_size, dtype=shown, layer_num=3, start_layer=5,
        kv_cache_layout=layout, kv_cache_arrangement=arrangement, **MLA, **extra,
    )  # fmt: skip


def dsa(page_size=64, size=128, dtype=torch.float8_e4m3fn, row=656, **extra):
    from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool

    extra = {"skip_topk_layers": [False, True, False], **extra}
    return DSATokenToKVPool(
        size=size, page_size=page_size, dtype=dtype, layer_num=3, start_layer=2, index_head_dim=128,
        kv_cache_dim=row, **MLA, **extra,
    )  # fmt: skip


def swa(**extra):
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    return SWAKVPool(
        size=12, size_swa=8, page_size=4, dtype=torch.bfloat16, head_num=3, head_dim=8,
        swa_attention_layer_ids=[0, 2, 4], full_attention_layer_ids=[1, 3], device="cpu", **extra,
    )  # fmt: skip


def mamba(layer_ids=(0, 2), slots=6):
    from sglang.srt.configs.mamba_utils import KimiLinearCacheParams, KimiLinearStateShape
    from sglang.srt.mem_cache.memory_pool import MambaPool

    shape = KimiLinearStateShape.create(tp_world_size=1, num_heads=2, head_dim=16)
    params = KimiLinearCacheParams(shape=shape, layers=list(layer_ids))
    return MambaPool(
        size=slots, spec_state_size=0, cache_params=params, mamba_layer_ids=list(layer_ids), device="cpu"
    )


def hybrid(use_mla=True, **extra):
    from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool

    geometry = {"kv_lora_rank": 512, "qk_rope_head_dim": 64} if use_mla else {}
    return HybridLinearKVPool(
        size=12, dtype=torch.bfloat16, page_size=4, head_num=2, head_dim=8, device="cpu",
        full_attention_layer_ids=[1, 3, 5], mamba_pool=mamba(), use_mla=use_mla, **geometry, **extra,
    )  # fmt: skip


def leaf_tensors(pool):
    """Every tensor that holds what a pool stores, by hand: (layer, part) to [pages or slots, ...]."""
    kind = type(pool).__name__
    if kind == "SWAKVPool":
        full = {("full", [1, 3][i], p): t for (_, i, p), t in positions(pool.full_kv_pool).items()}
        return full | {("window", [0, 2, 4][i], p): t for (_, i, p), t in positions(pool.swa_kv_pool).items()}
    if kind == "HybridLinearKVPool":
        rows = {("kv", [1, 3, 5][i], part): t for (_, i, part), t in positions(pool.full_kv_pool).items()}
        return rows | leaf_tensors(pool.mamba_pool)
    if kind == "MambaPool":
        cache = pool.mamba_cache
        kinds = {"conv_0": cache.conv[0], "ssm": cache.temporal}
        return {("state", layer, part): t[i] for i, layer in enumerate((0, 2)) for part, t in kinds.items()}
    first = {"DSATokenToKVPool": 2}.get(kind, 5)
    return {("kv", first + i, part): t for (_, i, part), t in positions(pool).items()}


def positions(pool):
    """As `leaf_tensors`, with positions instead of layer ids."""
    if hasattr(pool, "k_buffer"):
        found = {("kv", i, "k"): t for i, t in enumerate(pool.k_buffer)}
        return found | {("kv", i, "v"): t for i, t in enumerate(pool.v_buffer)}
    found = {("kv", i, "kv"): t for i, t in enumerate(pool.kv_buffer)}
    if getattr(pool, "kv_scale_buffer", None) is not None:
        found |= {("kv", i, "scale"): t for i, t in enumerate(pool.kv_scale_buffer)}
    if hasattr(pool, "index_k_with_scale_buffer"):
        index = enumerate(pool.index_k_with_scale_buffer)
        found |= {("kv", i, "indexer"): t for i, t in index if len(t)}
    return found


LAYOUTS = ["bf16", "fp8", "fp8_block_scale", "fp4"]
POOLS = {
    "mha": mha,
    "mha-page-1": lambda: mha(page_size=1, size=11),
    "mha-hnd": lambda: mha(),
    "mla-bf16": mla,
    "draft": lambda: mla(layers=1),  # of an MTP layer
    "mla-fp8": lambda: mla(torch.float8_e4m3fn),
    "mla-fp4-split": lambda: mla(torch.uint8, kind="MLATokenToKVPoolFP4"),
    **{f"ours-{name}": (lambda n=name: ours(n, "layer_major")) for name in LAYOUTS},
    "dsa-656": dsa,
    "dsa-bf16": lambda: dsa(dtype=torch.bfloat16, row=576),
    "swa": swa,
    "hybrid-mla": hybrid,
    "hybrid-mha": lambda: hybrid(use_mla=False),
    "mamba": mamba,
}  # fmt: skip


@pytest.fixture(params=POOLS)
def pool(request, monkeypatch):
    monkeypatch.setenv("SGLANG_USE_HND_KVCACHE", "1" if request.param == "mha-hnd" else "0")
    return POOLS[request.param]()


def as_bytes(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8).numpy()


def fill(tensors):
    """Different bytes everywhere, as far as a byte goes; no two tensors alike."""
    for number, tensor in enumerate(tensors.values()):
        raw = np.arange(tensor.nbytes, dtype=np.int64)
        raw = ((raw * (2 * number + 3) + number) % 251).astype(np.uint8)
        tensor.copy_(torch.from_numpy(raw).view(tensor.dtype).view(tensor.shape))


def test_a3_d5_every_layer_of_every_kind_is_there_and_is_the_pools_own_bytes(pool):
    """A3, D5: all parts of all layers, int8, in the pool's storage, byte for byte."""
    tensors = leaf_tensors(pool)
    fill(tensors)
    caches = CanonicalKVCaches.from_pool(pool)
    found = {(g.name, r.layer_id, r.part): (g, r) for g in caches.groups for r in g.layers}
    assert found.keys() == tensors.keys()
    for key, tensor in tensors.items():
        group, reference = found[key]
        view = caches.view(group, reference.runs)
        assert view.dtype == torch.int8
        assert view.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
        assert np.array_equal(as_bytes(view), as_bytes(tensor)), key
    assert len(caches.tensors) == len(tensors)


def test_page_counts_and_names(pool):
    kind = type(pool).__name__
    caches = CanonicalKVCaches.from_pool(pool)
    found = {g.name: (g.num_pages, g.page_size_tokens) for g in caches.groups}
    states = {"state": (7, None)}
    expected = {
        "DSATokenToKVPool": {"kv": (3, 64)},
        "SWAKVPool": {"full": (4, 4), "window": (3, 4)},
        "HybridLinearKVPool": {"kv": (4, 4), **states},
        "MambaPool": states,
    }.get(kind, {"kv": (4, 4)} if getattr(pool, "page_size", 4) == 4 else {"kv": (12, 1)})
    assert found == expected
    for group in caches.groups:
        assert group.indexed_by is (IndexedBy.STATE_SLOT if group.name == "state" else IndexedBy.PAGE)


def test_a5_a_page_moves_whole_and_alone(pool):
    """A5: page 1 of each group onto its page 2; every other byte stays."""
    tensors = leaf_tensors(pool)
    caches = CanonicalKVCaches.from_pool(pool)
    for group in caches.groups:
        fill(tensors)
        expected = {key: as_bytes(tensor).copy() for key, tensor in tensors.items()}
        for key, raw in expected.items():
            if key[0] == group.name:
                pages = raw.reshape(group.num_pages, -1)  # a view
                assert not np.array_equal(pages[2], pages[1])
                pages[2] = pages[1]
        copy_pages(caches, caches, group.name, torch.tensor([1]), torch.tensor([2]))
        for key, tensor in tensors.items():
            assert np.array_equal(as_bytes(tensor), expected[key]), key


# -------------------------------------------------------------------- ours, arranged


@pytest.mark.parametrize("page_size", [1, 2, 61, 64])
@pytest.mark.parametrize("arrangement", ["token_major", "page_major"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_arranged_pools_are_one_tensor_and_a_page_is_one_run(layout, arrangement, page_size):
    pool = ours(layout, arrangement, page_size, size=page_size * 4)
    caches = CanonicalKVCaches.from_pool(pool)
    (tensor,) = caches.tensors
    row = pool.row_format.row_bytes
    assert tuple(tensor.shape) == (5, 3 * page_size * row)
    group = caches.group("kv")
    (run,) = group.references
    assert (run.offset_bytes, run.run_bytes, run.run_count) == (0, 3 * page_size * row, 1)
    assert [r.layer_id for r in group.layers] == [5, 6, 7]
    slots = torch.arange(5 * page_size)
    for layer_id in (5, 6, 7):
        rows = pool.get_row_buffer(layer_id).squeeze(1)
        rows[pool.slot_to_row(slots)] = (slots % 251).to(torch.uint8)[:, None] + layer_id
    for layer in group.layers:
        moved = caches.view(group, layer.runs).reshape(5 * page_size, row).view(torch.uint8)
        expected = (np.arange(5 * page_size) % 251).astype(np.uint8) + np.uint8(layer.layer_id)
        assert np.array_equal(moved.numpy(), np.repeat(expected[:, None], row, axis=1))


@pytest.mark.parametrize("pair", itertools.permutations(["layer_major", "token_major", "page_major"], 2))
def test_pages_move_between_arrangements(pair):
    source, target = (ours("fp4", arrangement) for arrangement in pair)
    views = [CanonicalKVCaches.from_pool(p) for p in (source, target)]
    slots = torch.arange(16)
    for p, value in ((source, 3), (target, 0xEE)):
        for layer_id in (5, 6, 7):
            rows = p.get_row_buffer(layer_id).squeeze(1)
            numbers = (slots * 7 + layer_id).to(torch.uint8) if value == 3 else torch.full((16,), value)
            rows[p.slot_to_row(slots)] = numbers.to(torch.uint8)[:, None].expand(16, rows.shape[1])
    copy_pages(*views, "kv", torch.tensor([1, 3]), torch.tensor([2, 0]))
    for layer_id in (5, 6, 7):
        rows = target.get_row_buffer(layer_id).squeeze(1)[target.slot_to_row(slots)].view(4, 4, -1)
        assert (rows[[1, 3]] == 0xEE).all()
        for page, taken in ((2, 1), (0, 3)):
            expected = (torch.arange(4 * taken, 4 * taken + 4) * 7 + layer_id).to(torch.uint8)
            assert torch.equal(rows[page], expected[:, None].expand_as(rows[page]))


# -------------------------------------------------------------------- geometry is explicit


def test_b1_sizes_that_could_be_taken_for_each_other(monkeypatch):
    """B1: layers, pages, heads, tokens per page from {1, 2, 3}; two pages, two heads and the like."""
    for layers, pages, heads, page_size in itertools.product((1, 2, 3), (2, 3), (1, 2, 3), (1, 2, 3)):
        for hnd in ("0", "1"):
            monkeypatch.setenv("SGLANG_USE_HND_KVCACHE", hnd)
            size = (pages - 1) * page_size
            pool = mha(page_size, size, heads=heads, dim=2, v_dim=2, layers=layers)
            fill(leaf_tensors(pool))
            caches = CanonicalKVCaches.from_pool(pool)
            group = caches.group("kv")
            assert group.num_pages == pages
            assert [tuple(t.shape) for t in caches.tensors] == [(pages, page_size * heads * 4)] * 2 * layers
            assert all(("by head" in r.content) == (hnd == "1") for r in group.layers)
            for layer in range(layers):
                for part, buffers in (("k", pool.k_buffer), ("v", pool.v_buffer)):
                    view = caches.view(group, group.layer(5 + layer, part).runs)
                    assert np.array_equal(as_bytes(view), as_bytes(buffers[layer]))


def test_b1_sentinel_sizes():
    """B1: 1234 pages and 5678 heads, which vLLM used to probe shapes with, mean nothing here."""
    pool = mha(page_size=1, size=1233, heads=5678, dim=1, v_dim=1, layers=1)
    group = CanonicalKVCaches.from_pool(pool).group("kv")
    assert group.num_pages == 1234
    assert group.layer(5, "v").runs.size_bytes == 5678 * 2


@pytest.mark.parametrize(("page", "pages"), [(4, 6), (8, 3), (12, 2), (24, 1)])
def test_pages_fold_where_they_divide(page, pages):
    for make in (
        mha,
        mla,
        lambda **k: ours("fp4", "token_major", **k),
        lambda **k: ours("fp4", "page_major", **k),
    ):
        pool = make(page_size=4, size=20)
        plain, folded = CanonicalKVCaches.from_pool(pool), CanonicalKVCaches.from_pool(pool, page)
        group = folded.group("kv")
        assert (group.num_pages, group.page_size_tokens) == (pages, page)
        for reference in plain.group("kv").layers:
            other = group.layer(reference.layer_id, reference.part)
            whole = plain.view(plain.group("kv"), reference.runs)
            # One layer after the other in both, so that bytes compare page by page.
            whole.copy_(torch.from_numpy(np.arange(whole.numel()) * 7 % 127).view(whole.shape))
            view = folded.view(group, other.runs)
            assert np.array_equal(view.reshape(pages, -1).numpy(), whole.reshape(pages, -1).numpy())
        assert sum(r.size_bytes for r in group.references) == group.bytes_per_page


def test_index_pages_fold_into_pages():
    """The indexer's kernels see pages of 64 tokens, whatever the view's page is."""
    pool = dsa(size=64 * 5)
    caches = CanonicalKVCaches.from_pool(pool, 128)
    group = caches.group("kv")
    assert group.num_pages == 3
    assert group.layer(4, "indexer").runs.size_bytes == 2 * 8448
    assert group.layer(4, "kv").runs.size_bytes == 128 * 656
    with pytest.raises(KeyError):
        group.layer(3, "indexer")  # takes over the top-k of the layer before it


@pytest.mark.parametrize(
    ("make", "page", "message"),
    [
        (mha, 6, "pages of 6 tokens are not made of whole pages of the pool, which have 4"),
        (mla, 2, "pages of 2 tokens are not made of whole pages"),
        (mla, 12, r"MLATokenToKVPool has 12 \+ 4 slots, which are no whole number of pages of 12"),
        (lambda: mla(size=13), None, r"has 13 \+ 4 slots, which are no whole number of pages of 4"),
        (dsa, 96, "pages of 96 tokens are not made of whole pages of the pool, which have 64"),
        (dsa, 32, "pages of 32 tokens"),
        (mha, 0, "page_size_tokens=0 is not a positive integer"),
        (mha, 4.0, "page_size_tokens=4.0 is not"),
        (mha, True, "page_size_tokens=True is not"),
        (swa, 8, "slots, which are no whole number of pages of 8"),  # 12 + 4 divide, 8 + 4 do not
    ],
)
def test_pages_that_do_not_divide(make, page, message):
    with pytest.raises(ValueError, match=message):
        CanonicalKVCaches.from_pool(make(), page)


def mha_pair(first, second):
    return [mha(**{"size": 28, "page_size": 4, "layers": 1, **extra}) for extra in (first, second)]


@pytest.mark.parametrize(
    ("make", "page"),
    [
        # The same number of bytes, other shapes.
        (lambda: mha_pair({"heads": 2, "dim": 4, "v_dim": 4}, {"heads": 4, "dim": 2, "v_dim": 2}), None),
        (lambda: mha_pair({"heads": 4}, {"heads": 2, "page_size": 8, "size": 24}), None),
        (lambda: [mla(torch.float8_e4m3fn), mla(torch.float8_e5m2)], None),
        (lambda: [ours("fp8", "page_major"), mla(torch.float8_e5m2)], None),
        (lambda: [ours("fp8", "page_major", k_scales={5: 0.5}), ours("fp8", "page_major")], None),
        (lambda: [mla(page_size=4, size=12), mla(page_size=8, size=24)], None),
    ],
)
def test_bytes_that_mean_something_else_do_not_move(make, page):
    source, target = (CanonicalKVCaches.from_pool(p, page) for p in make())
    with pytest.raises(ValueError, match="the layers of group kv differ, or what their bytes mean"):
        copy_pages(source, target, "kv", torch.tensor([0]), torch.tensor([1]))


def test_heads_that_take_turns_in_other_pages_do_not_move(monkeypatch):
    """Two pages of 4 tokens hold the heads of a page of 8 in another order."""
    monkeypatch.setenv("SGLANG_USE_HND_KVCACHE", "1")
    source, target = mha_pair({"dim": 2, "v_dim": 2}, {"dim": 2, "v_dim": 2, "page_size": 8, "size": 24})
    views = CanonicalKVCaches.from_pool(source, 8), CanonicalKVCaches.from_pool(target)
    assert views[0].group("kv").bytes_per_page == views[1].group("kv").bytes_per_page
    with pytest.raises(ValueError, match="by head in pages of 4.*by head in pages of 8"):
        copy_pages(*views, "kv", torch.tensor([0]), torch.tensor([1]))


# -------------------------------------------------------------------- states


def test_c5_states_are_one_tensor_per_layer_and_kind():
    """C5: fill one layer and kind, all others unchanged; 42 and 99."""
    pool = hybrid()
    caches = CanonicalKVCaches.from_pool(pool)
    group = caches.group("state")
    state = pool.mamba_pool.mamba_cache
    state.conv[0].fill_(1), state.temporal.fill_(1)
    for rows in pool.full_kv_pool.kv_buffer:
        rows.fill_(1)
    caches.view(group, group.layer(2, "ssm").runs)[3] = torch.full((1024 * 2,), 42.0).view(torch.int8)[
        : 2 * 16 * 16 * 4
    ]
    conv = torch.full((3 * 96,), 99.0, dtype=torch.bfloat16).view(torch.int8)
    caches.view(group, group.layer(0, "conv_0").runs)[5] = conv
    assert (state.temporal[1, 3] == 42).all()
    assert (state.conv[0][0, 5] == 99).all()
    assert int((state.temporal != 1).sum()) == 2 * 16 * 16
    assert int((state.conv[0] != 1).sum()) == 3 * 96
    assert all((rows == 1).all() for rows in pool.full_kv_pool.kv_buffer)
    assert [r.layer_id for r in caches.group("kv").layers] == [1, 3, 5]
    names = [(r.layer_id, r.part) for r in group.layers]
    assert names == [(0, "conv_0"), (0, "ssm"), (2, "conv_0"), (2, "ssm")]


def test_a_hybrid_of_our_rows_and_states():
    from sgl_kvpool.layout import MLAKVCacheLayout
    from sgl_kvpool.pool import LayoutMLATokenToKVPool

    pool = hybrid(full_kv_pool_class=LayoutMLATokenToKVPool.bind(MLAKVCacheLayout.FP4))
    caches = CanonicalKVCaches.from_pool(pool)
    assert [r.layer_id for r in caches.group("kv").layers] == [1, 3, 5]
    assert caches.group("kv").bytes_per_page == 3 * 4 * 416
    assert caches.group("state").bytes_per_page == 2 * (3 * 96 * 2 + 2 * 16 * 16 * 4)


def test_a_window_pool_of_latent_rows():
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

    kinds = {"full_kv_pool_class": MLATokenToKVPool, "swa_kv_pool_class": MLATokenToKVPool}
    pool = swa(
        **kinds,
        full_kv_pool_kwargs={"page_size": 4, **MLA},
        swa_kv_pool_kwargs={"page_size": 4, **MLA, "kv_lora_rank": 128},
    )
    caches = CanonicalKVCaches.from_pool(pool)
    assert [r.layer_id for r in caches.group("full").layers] == [1, 3]
    assert [r.layer_id for r in caches.group("window").layers] == [0, 2, 4]
    assert caches.group("window").bytes_per_page == 3 * 4 * 192 * 2


# -------------------------------------------------------------------- refusals


def test_c7_unknown_kinds_are_refused_by_name():
    """C7: a subclass may store other bytes, so it is unknown as well."""
    from sglang.srt.mem_cache.memory_pool import MambaPool, MHATokenToKVPool, MLATokenToKVPool, ReqToTokenPool

    class OtherRows(MLATokenToKVPool):
        pass

    other = OtherRows(size=12, page_size=4, dtype=torch.bfloat16, layer_num=3, **MLA)
    requests = ReqToTokenPool(size=4, max_context_len=16, device="cpu", enable_memory_saver=False)
    for pool, name in ((other, "OtherRows"), (requests, "ReqToTokenPool"), (None, "NoneType")):
        with pytest.raises(TypeError, match=f"{name} is no kind of pool whose bytes are known; known are"):
            CanonicalKVCaches.from_pool(pool)
    assert {MambaPool, MHATokenToKVPool}  # the message names kinds that exist
    with pytest.raises(TypeError, match="HybridLinearKVPool.*MLATokenToKVPool.*and LayoutMLATokenToKVPool"):
        CanonicalKVCaches.from_pool(other)


def test_an_unknown_pool_inside_a_known_one_is_refused():
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    class OtherRows(MHATokenToKVPool):
        pass

    with pytest.raises(TypeError, match="OtherRows is no kind of pool"):
        CanonicalKVCaches.from_pool(swa(swa_kv_pool_class=OtherRows))


def test_bytes_that_a_pool_stores_beside_what_it_describes_are_noticed():
    """SGLang's MHABufferInfo leaves out the scales of native FP4."""
    pool = mha()
    scales = [torch.zeros(4, 3, 4, 1, dtype=torch.uint8) for _ in range(2)]
    pool.native_k_scale_buffer = pool.native_v_scale_buffer = scales
    with pytest.raises(TypeError, match="MHATokenToKVPool stores 2880 bytes, of which 2688 are in buffers"):
        CanonicalKVCaches.from_pool(pool)


@pytest.mark.parametrize("index_buf_size", [512, 64])
def test_index_keys_with_page_numbers_of_their_own_are_refused(index_buf_size):
    """As under decode context parallelism, where a page of index keys spans the ranks."""
    with pytest.raises(TypeError, match="page numbers of the two differ"):
        CanonicalKVCaches.from_pool(dsa(index_buf_size=index_buf_size))


def test_a_hybrid_around_a_pool_of_two_kinds_is_refused():
    with pytest.raises(TypeError, match="HybridLinearKVPool around a SWAKVPool is not described"):
        CanonicalKVCaches.from_pool(hybrid(use_mla=False, full_kv_pool=swa()))


def test_pipeline_stages_without_layers():
    from sgl_kvpool.pool import LayoutMLATokenToKVPool

    none = {"size": 12, "page_size": 4, "dtype": torch.bfloat16, "layer_num": 0, **MLA}
    pools = [mla(layers=0)] + [
        LayoutMLATokenToKVPool(**none, kv_cache_layout="fp4", kv_cache_arrangement=arrangement)
        for arrangement in ("layer_major", "token_major", "page_major")
    ]
    for pool in pools:
        caches = CanonicalKVCaches.from_pool(pool)
        assert caches.tensors == ()
        assert (caches.group("kv").num_pages, caches.group("kv").bytes_per_page) == (4, 0)
        assert pool.get_kv_size_bytes() == 0


def test_buffers_with_gaps_are_refused():
    """Where other layers lie between is known of our pools only."""
    pool = mla()
    wide = torch.zeros(16, 2, 576, dtype=torch.bfloat16)
    pool.kv_buffer[1] = wide[:, :1]
    with pytest.raises(
        ValueError, match="kv of layer 6 has shape .* its bytes do not lie one after the other"
    ):
        CanonicalKVCaches.from_pool(pool)


def test_compressed_index_keys_are_refused():
    pool = dsa(page_size=128, size=256, index_kpool=2, index_kpool_compress=True, max_running_requests=3)
    with pytest.raises(TypeError, match="compressed index keys keeps tails per request"):
        CanonicalKVCaches.from_pool(pool)
    pooled = dsa(page_size=128, size=256, index_kpool=2)
    group = CanonicalKVCaches.from_pool(pooled).group("kv")
    assert (group.num_pages, group.layer(2, "indexer").runs.size_bytes) == (3, 8448)


def test_d4_the_same_answer_in_a_fresh_process_and_after_another_view():
    """D4: nothing is remembered between views."""
    program = """
import torch
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.server_args import ServerArgs
publish(ServerArgs(model_path="dummy", device="cpu"), role="scheduler", ranks=SpawnRanks(0, None, 0))
from sgl_kvpool.canonical import CanonicalKVCaches
from sgl_kvpool.pool import LayoutMLATokenToKVPool
def make(arrangement):
    return LayoutMLATokenToKVPool(
        size=12, page_size=4, dtype=torch.bfloat16, layer_num=3, start_layer=5, kv_cache_layout="fp4",
        kv_cache_arrangement=arrangement, kv_lora_rank=512, qk_rope_head_dim=64, device="cpu",
        enable_memory_saver=False)
caches = CanonicalKVCaches.from_pool(make("token_major"))
print("@@@", [tuple(t.shape) for t in caches.tensors], caches.groups)
"""
    fresh = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    for arrangement in ("page_major", "layer_major", "token_major"):
        caches = CanonicalKVCaches.from_pool(ours("fp4", arrangement))
    here = f"{[tuple(t.shape) for t in caches.tensors]} {caches.groups}"
    assert fresh.rpartition("@@@ ")[2].strip() == here
