"""What keeps pages from being backed up, stored or found is counted by reason and logged once.

SGLang's tree, controller and `file` store over our host tier; servers use the Rust tree core, and the Python
core where Rust is absent.
"""

import os
import threading

import pytest
from direct_stores import Operation
from host_tier import slots, until

from sgl_kvpool.metrics import UNCACHED
from sgl_kvpool.srt.host import store_calls

TREES = pytest.mark.parametrize("tree", ["rust", "python"])
PAGE = 4  # tokens


def prompt(pages, first):
    return list(range(first, first + pages * PAGE))


@pytest.fixture
def uncached(counting, monkeypatch):
    """`uncached()`: pages counted since the test began, by reason; each reason is logged again."""
    from sgl_kvpool import metrics

    monkeypatch.setattr(metrics, "_logged", set())

    def now():
        return {reason: counting("sgl_kvpool_uncached_pages_total", reason=reason) for reason in UNCACHED}

    before = now()
    return lambda: {reason: n - before[reason] for reason, n in now().items() if n != before[reason]}


@pytest.fixture
def dense(model_of, monkeypatch, tmp_path):
    """`dense(pages, ...)`: a dense model; its store, of the start or attached later, is in `tmp_path`."""
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path))
    return lambda pages, **arguments: model_of("dense", page_size=PAGE, pages=pages, **arguments)


def keys(tokens):
    from sglang.srt.mem_cache.utils import get_storage_hash_str

    return get_storage_hash_str(tokens, None, page_size=PAGE)


def stored(folder):
    """Keys of the pages in a store."""
    return sorted(name.partition("_")[0] for name in os.listdir(folder) if name.endswith(".bin"))


def store_what_waits(model):
    """Let the store's thread write what it was given."""
    until(lambda: model.settle() or not model.cache.ongoing_backup)


def logged(caplog, reason):
    return [line for line in caplog.messages if UNCACHED[reason].message in line]


# -------------------------------------------------------------------- a tier without room


@TREES
def test_pages_that_a_full_tier_does_not_take_are_counted(dense, tree, uncached, caplog, tmp_path):
    """The pool has 24 pages and the tier 13: SGLang backs up and stores 12, and its log says nothing."""
    model = dense(24, store=tmp_path, ratio=0.5, tree=tree)
    prompts = [prompt(3, 1000 * n) for n in range(8)]
    for tokens in prompts:
        model.put(tokens)
        store_what_waits(model)
    assert stored(tmp_path) == sorted(key for tokens in prompts[:4] for key in keys(tokens))
    assert uncached() == {"tier_full": 12}
    (line,) = logged(caplog, "tier_full")
    assert "(12 tokens of a prompt, 4 of 52 are free); give a larger --hicache-ratio" in line


@TREES
def test_a_prompt_that_is_longer_than_the_tier_is_counted(dense, tree, uncached, caplog):
    model = dense(24, ratio=0.5, tree=tree)
    model.put(prompt(14, 0))
    assert model.tier.available_size() == 13 * PAGE
    assert uncached() == {"prompt_too_long": 14}
    (line,) = logged(caplog, "prompt_too_long")
    assert "(56 tokens, and the tier has 52)" in line


def test_a_state_without_room_is_counted(model_of, uncached, caplog):
    """A hybrid model whose states fill their tier first."""
    model = model_of("hybrid", ratio=0.5)
    for n in range(5):
        model.put(list(range(100 * n, 100 * n + 3)))
    assert set(uncached()) == {"tier_full"}
    assert "the state of 3 tokens of a prompt" in logged(caplog, "tier_full")[0]


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ({"ratio": 0.5}, "give a larger --hicache-ratio of at least 1.00, or --hicache-write"),
        ({"hicache_size": 0.01}, None),
        ({"ratio": 1.0}, None),
        ({"ratio": 0.5, "hicache_write_policy": "write_through_selective"}, "at least 1.00"),
        ({"ratio": 0.5, "hicache_write_policy": "write_back"}, None),
    ],
)
def test_a_tier_smaller_than_the_pool_is_named_at_start(dense, caplog, arguments, names):
    dense(24, **arguments)
    said = [line for line in caplog.messages if "fill the tier" in line]
    assert len(said) == (names is not None)
    assert all("the host tier has 52 tokens and the device's pool 96" in line for line in said)
    assert all(names in line for line in said)


# -------------------------------------------------------------------- a store attached at run time


def attach(model):
    done, message = model.cache.attach_storage_backend(
        "file", storage_backend_extra_config_json='{"prefetch_threshold": 1}', served_model_name="model"
    )
    assert done, message


@TREES
def test_pages_from_before_a_store_was_attached_are_stored_with_what_extends_them(dense, tree, tmp_path):
    model = dense(64, tree=tree)
    old, other = prompt(8, 0), prompt(5, 500)
    model.put(old, other)
    attach(model)
    store_what_waits(model)
    assert stored(tmp_path) == []
    longer = old + prompt(4, 2000)
    model.put(longer)
    store_what_waits(model)
    assert stored(tmp_path) == sorted(keys(longer))
    # A prompt that leaves another one in the middle: SGLang splits its node.
    branch = other[: 3 * PAGE] + prompt(2, 3000)
    model.put(branch)
    store_what_waits(model)
    assert stored(tmp_path) == sorted({*keys(longer), *keys(branch)})
    # The rest of the split prompt.
    model.put(other + prompt(1, 4000))
    store_what_waits(model)
    assert stored(tmp_path) == sorted({*keys(longer), *keys(branch), *keys(other + prompt(1, 4000))})


def test_each_old_page_is_given_to_the_store_once(dense, tmp_path):
    model = dense(64)
    model.put(prompt(8, 0))
    attach(model)
    given, write = [], model.controller.write_storage
    model.controller.write_storage = lambda *args, **kwargs: given.append(args[2]) or write(*args, **kwargs)
    for n in range(3):
        model.put(prompt(8, 0) + prompt(1, 1000 * (n + 1)))
        store_what_waits(model)
    assert len(given) == 4
    assert len({key for some in given for key in some}) == 8 + 3


# -------------------------------------------------------------------- a store that does not answer


@pytest.fixture
def limit(monkeypatch):
    monkeypatch.setattr(store_calls, "_LIMIT_SECONDS", 0.2)


def in_thread(call):
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


def test_a_read_that_hangs_is_counted_while_it_hangs(dense, limit, uncached, caplog, tmp_path):
    """One file of the store is a FIFO."""
    model = dense(16, store=tmp_path)
    tokens = prompt(4, 0)
    model.put(tokens)
    store_what_waits(model)
    assert uncached() == {}
    (name,) = (name for name in os.listdir(tmp_path) if name.startswith(keys(tokens)[2]))
    os.remove(tmp_path / name)
    os.mkfifo(tmp_path / name)

    get = model.controller._generic_page_get
    read = in_thread(lambda: get(Operation(), keys(tokens), slots(range(4), PAGE)))
    until(lambda: uncached() == {"store_slow": 4})
    assert read.is_alive()
    (line,) = logged(caplog, "store_slow")
    assert "(to read 4 pages takes longer than" in line
    with open(tmp_path / name, "wb"):  # the read ends with a page that is too short, the retry without one
        os.remove(tmp_path / name)
    read.join(20)
    assert not read.is_alive()
    assert uncached() == {"store_slow": 4}
    assert len(logged(caplog, "store_slow")) == 1


@pytest.mark.parametrize("method", ["exists", "set"])
def test_a_search_or_a_write_that_hangs_is_counted(dense, limit, uncached, tmp_path, method):
    model = dense(16, store=tmp_path)
    store, goes_on = model.controller.storage_backend, threading.Event()
    original = getattr(store, method)
    setattr(store, method, lambda *args: goes_on.wait(20) and original(*args))
    if method == "exists":
        call = in_thread(lambda: store.batch_exists(keys(prompt(3, 0))))
    else:
        model.put(prompt(3, 0))
        call = model.controller.backup_thread
    until(lambda: uncached() == {"store_slow": 3})
    goes_on.set()
    until(lambda: not model.cache.ongoing_backup or model.settle())
    if method == "set":
        assert stored(tmp_path) == sorted(keys(prompt(3, 0)))
    else:
        call.join(20)
    assert uncached() == {"store_slow": 3}
