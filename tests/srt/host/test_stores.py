"""SGLang's `file` store under our host tier: restarts, other layouts, and damaged files."""

import os
import re
import resource
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from codec_oracle import ROW_BYTES
from direct_stores import KEYS, Operation, flipped
from host_tier import host_bytes, slots, stride_bytes, tier_of
from pools import GUARD, LAYERS, device_pool

PAGE_SIZE = 4


def filled(controller, seed=3):
    """Fill every host page with random bytes; returns them."""
    pages = host_bytes(tier_of(controller))
    pages[...] = np.random.default_rng(seed).integers(0, 256, pages.shape, dtype=np.uint8)
    return pages.copy()


def put(controller, pages=(3, 1, 4, 0)):
    """Store pages under KEYS as SGLang's backup thread does."""
    return controller._generic_page_set(KEYS[: len(pages)], slots(pages, PAGE_SIZE))


def get(controller, pages=(0, 5, 2, 6), keys=None):
    """Fetch pages as SGLang's prefetch thread does; returns the number of pages and the host memory."""
    host_bytes(tier_of(controller))[...] = GUARD
    hits = controller._generic_page_get(Operation(), keys or KEYS, slots(pages, PAGE_SIZE))
    return hits, host_bytes(tier_of(controller))


def files(store):
    """The file of each key."""
    return {name[:1]: Path(store, name) for name in sorted(os.listdir(store)) if name.endswith(".bin")}


def test_a_store_that_the_server_loads_by_its_class(controller_of, store):
    """`--hicache-storage-backend dynamic`: its keys contain the layout too."""
    config = {
        "backend_name": "named", "module_path": "sglang.srt.mem_cache.hicache_storage",
        "class_name": "HiCacheFile", "file_storage_path": str(store),
    }  # fmt: skip

    def server(layout):
        controller, extra = controller_of(device_pool(layout, pages=9)), dict(config)
        controller.attach_storage_backend("dynamic", model_name="model", storage_backend_extra_config=extra)
        return controller

    for layout in ("fp4", "fp8_block_scale"):
        assert server(layout).storage_backend.batch_exists(KEYS) == 0  # with pages of the other layout
        wanted = filled(first := server(layout))
        assert put(first)
        hits, found = get(server(layout))
        assert hits == 4
        assert np.array_equal(found[[0, 5, 2, 6]], wanted[[3, 1, 4, 0]])


def test_old_pages_of_another_layout_are_removed_by_time(controller_of, store):
    """The command of docs/transfer.md."""
    page = Path(__file__).parents[3] / "docs" / "transfer.md"
    (command,) = re.findall(r"^find .* -delete$", page.read_text(), re.M)
    for layout in ("bf16", "fp4"):
        filled(controller := controller_of(device_pool(layout, pages=9), store=store))
        assert put(controller)
    an_hour_ago = time.time() - 3600
    for path in store.glob("*_model-bf16-*"):
        os.utime(path, (an_hour_ago, an_hour_ago))
    started = time.strftime("%Y-%m-%d %H:%M", time.localtime(time.time() - 600))
    assert "2026-01-31 12:00" in command
    subprocess.run(["bash", "-c", command.replace("2026-01-31 12:00", started)], check=True)
    left = os.listdir(store)
    assert len(left) == 4
    assert all("_model-fp4-" in name for name in left)


def test_the_folder_is_made_for_this_account_and_checked_at_every_attachment(controller_of, tmp_path, caplog):
    store = tmp_path / "new" / "store"
    controller = controller_of(device_pool("fp4", pages=9), store=store)
    assert store.stat().st_mode & 0o7777 == 0o700
    assert "other accounts" not in caplog.text
    filled(controller)
    before = os.umask(0o027)
    try:
        assert put(controller)
    finally:
        os.umask(before)
    # Files follow the umask, so that accounts may share a folder on purpose.
    assert {path.stat().st_mode & 0o777 for path in files(store).values()} == {0o640}
    store.chmod(0o755)
    controller.detach_storage_backend()
    controller.attach_storage_backend(storage_backend="file", model_name="model")
    assert (
        f"sgl-kvpool: other accounts can read or replace pages of the store in {store}: any account may read "
        f"{store} (mode 0755); use a folder that only this account can enter and replace (chmod 700), or set "
        "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR to one"
    ) in caplog.text


#: Damage -> bytes of a file, given its own, the size of its page and another file's bytes; the failure.
DAMAGE = {
    "truncated": (lambda raw, size, other: raw[:-1], "page_read"),
    "lengthened": (lambda raw, size, other: raw[:100] + bytes(20) + raw[100:], "page_checksum"),
    "a bit of a row": (lambda raw, size, other: flipped(raw, len(raw) // 2), "page_checksum"),
    "a bit of the checksum": (lambda raw, size, other: flipped(raw, size - 1), "page_checksum"),
    "a bit behind the page": (lambda raw, size, other: flipped(raw, len(raw) - 1), "page_checksum"),
    "of another key": (lambda raw, size, other: other, "page_checksum"),
    "zeros": (lambda raw, size, other: bytes(len(raw)), "page_checksum"),
    "a folder": (None, "page_read"),
    "gone": (None, None),  # an ordinary miss
}


@pytest.mark.parametrize("layout", ["bf16", "fp4"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_bad_file_is_a_miss(controller_of, store, failures, caplog, damage, layout):
    """Pages before it are served, the damaged page and later pages are not, and the next fetch works."""
    first = controller_of(device_pool(layout, pages=9), store=store)
    wanted = filled(first)
    assert put(first)
    (change, failure), path = DAMAGE[damage], files(store)["2"]
    raw, other = path.read_bytes(), files(store)["0"].read_bytes()
    page_bytes = stride_bytes(LAYERS, PAGE_SIZE, ROW_BYTES[layout])
    assert len(raw) > page_bytes
    path.unlink()
    if change is not None:
        path.write_bytes(change(raw, page_bytes, other))
    elif damage == "a folder":
        path.mkdir()
    again = controller_of(device_pool(layout, pages=9), store=store)
    hits, pages = get(again)
    assert hits == 2
    expected = np.full_like(pages, GUARD)
    expected[[0, 5]] = wanted[[3, 1]]
    assert np.array_equal(pages, expected)
    assert failures() == ({failure: 1} if failure else {})
    if failure:
        assert f"page {KEYS[2]} of the store, host slot {2 * PAGE_SIZE}" in caplog.text
    assert get(again, [4], [KEYS[3]])[0] == 1


def test_a_store_that_fails_once(controller_of, store, failures, caplog):
    """All pages are served, and the log reports the failure."""
    controller = controller_of(device_pool("fp8", pages=9), store=store)
    wanted, backend = filled(controller), controller.storage_backend
    assert put(controller)
    read, calls = backend.get, []

    def flaky(*args, **kwargs):
        calls.append(args)
        if len(calls) == 3:
            raise OSError(5, "flaky on purpose")
        return read(*args, **kwargs)

    backend.get = flaky
    hits, found = get(controller)
    assert hits == 4
    assert np.array_equal(found[[0, 5, 2, 6]], wanted[[3, 1, 4, 0]])
    assert failures() == {"page_read": 1}
    assert "flaky on purpose" in caplog.text


def test_a_full_disk(controller_of, store, failures):
    """A limit on the file size replaces the full disk: writing fails part of the way, with a real error."""
    controller = controller_of(device_pool("bf16", pages=9), store=store)
    filled(controller)
    page_bytes = tier_of(controller).page_bytes
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (page_bytes // 2, limits[1]))
    try:
        assert not put(controller)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert failures() == {"page_write": 1}
    assert os.listdir(store) == []  # no half-written file is left for a later reader
    assert put(controller)
    assert get(controller)[0] == 4


def test_names_that_are_too_long_are_refused_at_start(controller_of, store, monkeypatch):
    refused = r"names of \d+ bytes, 255 at most; give a shorter --served-model-name"
    with pytest.raises(ValueError, match=refused):
        controller_of(device_pool("fp4", pages=9), store=store, model_name="m" * 190)
    without = controller_of(device_pool("fp4", pages=9), model_name="m" * 190)
    for backend in ("file", "nixl"):  # a store that is attached while serving
        with pytest.raises(ValueError, match=rf"^--hicache-storage-backend {backend} names .* 255 at most"):
            without.attach_storage_backend(backend, model_name="m" * 190)
        assert not without.enable_storage
    objects = {"plugin": {"obj": {"active": True}}}  # their keys may be longer; there is no bucket or no NIXL
    with pytest.raises((RuntimeError, ImportError)):
        without.attach_storage_backend("nixl", model_name="m" * 190, storage_backend_extra_config=objects)
    most = 255 - len("0" * 64 + "_-.bin") - len(without.storage_host_pool.storage_format_tag)
    longest = controller_of(device_pool("fp4", pages=9), store=store, model_name="m" * most)
    filled(longest)
    assert put(longest)
    for backend, stages, beyond in (("file", 1, 1), ("nixl", 2, 1), ("file", 2, 1 - 27)):
        other = controller_of(device_pool("fp4", pages=9))
        # Of groups, which another test of this process may have made for one stage.
        sizes = SimpleNamespace(pp_size=stages, attn_cp_size=1, attn_dcp_size=1)
        with monkeypatch.context() as groups:
            groups.setattr("sglang.srt.runtime_context.get_parallel", lambda sizes=sizes: sizes)
            with pytest.raises(ValueError, match="names of 256 bytes"):
                other.attach_storage_backend(backend, model_name="m" * (most + beyond))
