"""Keys of stores after updates of weights: the name in them, SGLang's `file` store, ranks.

Requests of real servers are in tests/engine/test_weight_updates.py.
"""

import re
import shutil
import threading
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from batches import radix_attention
from direct_stores import KEYS
from host_tier import slots, tier_of
from pools import LAYERS, START, device_pool
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers import cache_controller
from sglang.srt.mem_cache.pool_host import common
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from test_hybrid_stores import fetched, prompt, stored
from test_hybrid_stores import files as files_of
from test_stores import PAGE_SIZE, filled, get, put

from sgl_kvpool.sglang_plugin.hooks import stores, weights
from sgl_kvpool.srt.host import store_calls
from sgl_kvpool.srt.host.served_weights import ServedWeights
from sgl_kvpool.srt.pool import k_scales
from sgl_kvpool.srt.pool.k_scales import checked_k_scales
from sgl_kvpool.srt.pool.mla import LayoutMLATokenToKVPool
from sgl_kvpool.transfer.host_options import HostTierOptions

KEY = "0123456789abcdef" * 4


@pytest.fixture
def serve(monkeypatch):
    """`serve(version)`: a server that starts with a weight version; its stores are attached afterwards."""

    def start(version="default"):
        server = ServedWeights()
        for module in (weights, stores, store_calls):
            monkeypatch.setattr(module, "SERVED", server)
        monkeypatch.setattr(k_scales, "_followed", [])
        monkeypatch.setattr(weights, "_version", lambda: version)
        return server

    return start


def update(server, version=None, k_scales=str):
    """An update of one call, as from a disk."""
    server.begin("default")
    server.loaded(version)
    assert server.flushed(k_scales)


def started(version="default", random="drawn", own="own"):
    server = ServedWeights()
    server.start(version, random, own, "")
    return server


# ------------------------------------------------------------------ names


def test_keys_of_a_server_without_updates_are_sglangs():
    assert started().key(KEY) == KEY


def test_a_name_takes_the_end_of_a_key_and_is_added_once():
    server = started("v2")
    named = server.key(KEY)
    assert (len(named), named[:48]) == (64, KEY[:48])
    assert named != KEY
    assert server.key(named) == named
    assert int(named, 16)


def after(steps, **drawn):
    """A server after steps: methods of `ServedWeights` with versions, `load` and `fail` in sessions."""
    server = started(**drawn)
    for step in filter(None, steps.split(", ")):
        what, *versions = step.replace("none", "").split(" ")
        if what == "session":
            server.begin("default", session=True)
        elif what in ("load", "fail"):
            server.begin_load()
            if what == "load":
                server.loaded(*versions or [None])
            server.end_load()
        elif what == "flush":
            server.flushed(str)
        else:
            getattr(server, what)(*versions or {"begin": ["default"], "loaded": [None]}.get(what, []))
    return server


NOTHING, NOT_YET, DRAWN, OWN = "", "not yet", "by all replicas' random part", "by this replica's"


@pytest.mark.parametrize(
    ("steps", "name"),
    [
        ("", NOTHING),
        ("begin, loaded v2", NOT_YET),
        ("begin, loaded v2, flush", "v2"),
        ("begin v1, loaded v2, flush, begin v2, loaded v1, flush", "v1"),
        # No version, that of before, or none of SGLang's: what changed has no name.
        ("begin, loaded, flush", DRAWN),
        ("begin v2, loaded v2, flush", DRAWN),
        ("begin v1, loaded default, flush", DRAWN),
        ("begin v1, loaded none, flush", DRAWN),
        ("begin, loaded v2, begin v2, loaded, flush", DRAWN),
        # The weights of a replica that failed to load are its own.
        ("begin, flush", OWN),
        ("begin, flush, begin, loaded, flush", DRAWN),
        ("session, fail, load, end, flush", OWN),
        ("session, load v2, fail v2, load v2, end, flush", OWN),
        # A session is named at its end, by a flush after its last load.
        ("session, load v2, flush", NOT_YET),
        ("session, load v2, flush, load v2, flush, end, flush", "v2"),
        ("session, load, flush, load, end", NOT_YET),
        ("session, load, flush, load, end, flush", DRAWN),
        # SGLang accepts /update_weights_from_disk and the check that overwrites weights within a session.
        ("session, fail v2, begin, loaded v2, flush", NOT_YET),
        ("session, fail v2, begin, loaded v2, end, flush", OWN),
        # A version alone names weights that came without a load.
        ("session, end, renamed v2 default", NOT_YET),
        ("session, end, renamed v2 default, flush", "v2"),
        ("session, end, renamed v2 default, flush, renamed v2 v2", "v2"),
    ],
)
def test_what_names_the_weights(steps, name):
    """Replicas have the drawn part in common, so they find each other's pages where it names the weights."""
    server, of_others, elsewhere = after(steps), after(steps, random="other"), after(steps, own="other")
    if server.unsettled:
        assert name == NOT_YET
        return
    changes = (server.digits != of_others.digits, server.digits != elsewhere.digits)
    assert changes == (name == DRAWN, name == OWN)
    if name not in (DRAWN, OWN):
        assert server.digits == started(name or "default").digits
    assert (server.digits == "") == (name == NOTHING)


def test_names_of_different_weights_differ():
    versions = [started(version) for version in ("", "v1", "v2", "v3")]
    unnamed = [after("begin, loaded, flush" + ", begin, loaded, flush" * count) for count in range(3)]
    assert len({server.digits for server in (*versions, *unnamed)}) == 7
    # With DP attention every rank has its own requests, and refuses flushes alone.
    refused, flushed = (after(f"begin, loaded v2{more}, begin v2, loaded, flush") for more in ("", ", flush"))
    assert refused.digits == flushed.digits


def test_whether_a_session_was_flushed_after_its_last_load():
    """Its end repeats the flush then."""
    assert after("session, load, flush, load, flush").end()
    assert not after("session, load, flush, load").end()


def test_k_scales_are_part_of_a_name():
    update(server := started(), "v2", lambda: "1234abcd")
    assert server.digits not in ("", started("v2").digits)


@pytest.mark.parametrize(
    ("action", "changes"), [("reset_tensors", True), ("checksum", False), ("snapshot", False)]
)
def test_sglangs_check_of_weights_may_overwrite_them(serve, action, changes):
    server = serve()
    assert weights._check_weights(lambda *_: "done", None, SimpleNamespace(action=action)) == "done"
    assert server.unsettled == changes


# ------------------------------------------------------------------ a store


def test_what_a_decode_server_still_stores_in_a_flush_keeps_the_old_name(
    serve, controller_of, store, counting, monkeypatch
):
    """SGLang flushes while a decode server's generated rows wait for the store, or are being stored."""
    server, goes_on, begun = serve(), threading.Event(), threading.Event()
    monkeypatch.setattr(cache_controller, "STORAGE_BATCH_SIZE", 1)
    monkeypatch.setattr(k_scales, "_followed", [])
    controller = controller_of(device_pool("fp4", pages=9), store=store)
    filled(controller)
    waiting = partial(counting, "sgl_kvpool_uncached_pages_total", reason="weights")
    before, put_one = waiting(), controller.storage_backend.set

    def slow(*args, **kwargs):
        begun.set()
        assert goes_on.wait(20)
        return put_one(*args, **kwargs)

    monkeypatch.setattr(controller.storage_backend, "set", slow)
    controller.write_storage(slots([2, 3], PAGE_SIZE), list(range(8)), hash_value=KEYS[:2])
    controller.write_storage(slots([7], PAGE_SIZE), list(range(4)), hash_value=KEYS[2:3])
    assert begun.wait(20)
    server.begin("default")
    assert weights._flush_cache(lambda _: True, SimpleNamespace(tree_cache=None))
    assert server.digits != ""
    goes_on.set()
    completed = [controller.ack_backup_queue.get(timeout=20).completed_tokens for _ in range(2)]
    assert completed == [2 * PAGE_SIZE, 0]
    assert sorted(path.name.partition("_")[0] for path in store.iterdir()) == sorted(KEYS[:2])
    assert waiting() - before == 1
    controller.write_storage(slots([7], PAGE_SIZE), list(range(4)), hash_value=KEYS[2:3])
    assert controller.ack_backup_queue.get(timeout=20).completed_tokens == PAGE_SIZE
    assert controller.storage_backend.batch_exists(KEYS[2:3]) == 1


@pytest.mark.parametrize("label", ["page_first", "page_first_direct"])
def test_a_page_under_the_name_of_other_weights_is_damaged(serve, controller_of, store, failures, label):
    """The checksum is seeded with the key in the store: it changes with the name, and only with it."""
    server = serve()
    controller = controller_of(device_pool("fp4", pages=9), label, store)
    filled(controller)
    assert put(controller, pages=(3,))
    (old,) = store.iterdir()
    update(server)
    shutil.copy(old, old.with_name(old.name.replace(KEYS[0], server.key(KEYS[0]))))
    assert controller.storage_backend.batch_exists(KEYS) == 1
    assert get(controller, pages=(0,), keys=KEYS[:1])[0] == 0
    assert failures() == {"page_checksum": 1}
    serve()  # a restart without a version: the old page is whole
    again = controller_of(device_pool("fp4", pages=9), label, store)
    assert get(again, pages=(0,), keys=KEYS[:1])[0] == 1


def test_pages_of_sglangs_own_host_pool_are_named_too(serve, controller_of, store, monkeypatch):
    """bf16 rows on CUDA: their keys are SGLang's, and contain no row format."""
    monkeypatch.setattr(LayoutMLATokenToKVPool, "has_our_tier", False)
    monkeypatch.setattr(common, "_cuda_host_register", lambda *_, **__: None)
    server = serve()
    controller = controller_of(device_pool("bf16", pages=9), store=store)
    assert type(tier_of(controller)) is MLATokenToKVPoolHost
    assert put(controller)
    assert sorted(path.name for path in store.iterdir()) == sorted(f"{key}_model.bin" for key in KEYS)
    update(server)
    assert controller.storage_backend.batch_exists(KEYS) == 0
    assert put(controller, pages=(0,))
    assert controller.storage_backend.batch_exists(KEYS) == 1


def test_states_are_named_like_their_rows(serve, model_of, store, failures):
    server = serve()
    model = model_of("hybrid", page_size=4, store=store)
    stored(model, prompt(8))
    update(server, "v2")
    again = model_of("hybrid", page_size=4, store=store)
    assert fetched(again, prompt(8)) == 0
    stored(again, prompt(8))
    assert (len(files_of(store, True)), len(files_of(store, False))) == (2, 4)
    serve("v2")
    assert fetched(model_of("hybrid", page_size=4, store=store), prompt(8)) == 8
    assert failures() == {}


# ------------------------------------------------------------------ k_scales


class Attention(torch.nn.ModuleList):
    """A model of attention modules alone, on which SGLang's loader sets k_scale."""

    def __init__(self, scale):
        layers = range(START, START + LAYERS)
        super().__init__(radix_attention(1, 512, 64, layer_id=layer, scaling=1.0) for layer in layers)
        self.load(scale)

    def load(self, scale):
        for layer in self:
            layer.k_scale_float = scale


def scheduler_of(graph=None, mode="null"):
    """What the flush asks a scheduler: its graphs, and whether it has peers."""
    runner = SimpleNamespace(decode_cuda_graph_runner=graph, prefill_cuda_graph_runner=None)
    updater = SimpleNamespace(_select_runners=lambda: [("target", runner)])
    return SimpleNamespace(weight_updater=updater, disaggregation_mode=DisaggregationMode(mode))


@pytest.fixture
def followed(monkeypatch):
    """`followed(pool, model)`: the k_scales of a pool follow those of a model."""
    monkeypatch.setattr(k_scales, "_followed", [])

    def follow(pool, model, readers=("kvpool_mla",)):
        k_scales.follow_k_scales(pool, lambda: checked_k_scales(model, pool.kv_cache_layout, readers))
        return pool

    return follow


def test_a_pool_takes_new_k_scales(published, followed):
    """Values up to 1232, as of weights whose k_scale is 4, are stored without clamping at 448."""
    pool = followed(device_pool("fp8", pages=9), model := Attention(1.0))
    model.load(4.0)
    assert pool.k_scale(START) == 1.0
    k_scales.take_k_scales(scheduler_of())
    assert {pool.k_scale(START + layer) for layer in range(LAYERS)} == {4.0}
    assert k_scales.followed_digest() != ""
    values = torch.linspace(-1232, 1232, 576).bfloat16().view(1, 1, -1)
    where = torch.tensor([5])
    pool.set_mla_kv_buffer(model[0], where, values[..., :512], values[..., 512:])
    nope, rope = pool.get_mla_kv_buffer(model[0], where, torch.float32)
    read = torch.cat([nope, rope], -1).view(-1)
    assert (read - values.view(-1).float()).abs().max() <= 1232 / 16


@pytest.mark.parametrize(
    ("pool", "readers", "scheduler", "reason"),
    [
        ({}, "kvpool_mla", {"graph": object()}, "CUDA graphs have captured the old one"),
        ({}, "kvpool_mla", {"mode": "prefill"}, "peers have compared the old one"),
        ({"host_tier": HostTierOptions("fp4")}, "kvpool_mla", {}, "host tier converts rows with the old one"),
        ({}, "flashmla", {}, "k_scale=4.0 in layer .*flashmla does not multiply .*kvpool_mla"),
    ],
)
def test_k_scales_that_others_keep_end_the_server(published, followed, pool, readers, scheduler, reason):
    followed(device_pool("fp8", pages=9, **pool), model := Attention(1.0), (readers,))
    model.load(4.0)
    changed = f"an update of weights has changed k_scale of layer {START} from 1.0 to 4.0, and "
    with pytest.raises(RuntimeError if readers == "kvpool_mla" else ValueError) as error:
        k_scales.take_k_scales(scheduler_of(**scheduler))
    text = str(error.value)
    assert re.search(reason, text)
    assert text.startswith(changed) == (readers == "kvpool_mla")
    assert "\n" not in text
