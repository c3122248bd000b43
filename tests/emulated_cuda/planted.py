"""Faults that are planted in a server, one at a time, to see which answers notice them.

The scheduler is a fork of the process that plants them, and shares with it which one is present. No graph may
run: it would repeat what was present when it was recorded.
"""

import functools
import multiprocessing
import pkgutil

_present = multiprocessing.get_context("fork").Value("i", 0)


def _k_scale(real, pool, index, layer, *more):
    """The pool's second layer stores rows with the k_scale of the third one, and reads them with its own."""
    real(pool, index, layer + (index == 1), *more)


def _rope(real, pool, index, layer, slots, latent, rope, method):
    """Rows of a prefill have the rope keys of the token before."""
    real(pool, index, layer, slots, latent, rope.roll(1, 0), method)


def _prefix(real, prefix_lens, *more):
    return real([max(length - 1, 0) for length in prefix_lens], *more)


def _topk(real, layer, lists, kept=[]):  # noqa: B006 (of the forward pass)
    """All layers get the lists of the first one."""
    if layer == 0:
        kept[:] = [lists]
    return real(layer, kept[0])


def _draft(real, reader, *more):
    """A draft, whose pool has one layer, reads the slot of the next token for each token."""
    own = reader._local_indices
    if len(reader.pool.row_pool.kv_buffer) == 1:
        reader._local_indices = own.roll(-1, 1)
    real(reader, *more)
    reader._local_indices = own


def _host_row(real, tier, pool, host_slots, slots, layer, *more, **options):
    """Layer 1 gets the rows of layer 0, which was loaded before."""
    real(tier, pool, host_slots, slots, layer, *more, **options)
    if layer == 1:
        rows = pool.slot_to_row(slots.to(pool.device))
        pool.kv_buffer[1][rows] = pool.kv_buffer[0][rows]


#: Fault -> the function in whose place it is, and what is called with it instead.
FAULTS = {
    "k_scale": ("sgl_kvpool.srt.pool.mla.LayoutMLATokenToKVPool._store", _k_scale),
    "rope": ("sgl_kvpool.srt.pool.mla.LayoutMLATokenToKVPool._store", _rope),
    "prefix": ("sgl_kvpool.srt.attention.prefill.plan_extend", _prefix),
    "top-k": ("sglang.srt.layers.attention.dsa.dsa_indexer.maybe_capture_indexer_topk", _topk),
    "draft": ("sgl_kvpool.srt.attention.decode_verify.ListReader.attend", _draft),
    "host row": ("sgl_kvpool.srt.host.transfer_mixin.TransferMixin.load_to_device_per_layer", _host_row),
}


def plant():
    """Replace the functions, before a server starts."""
    for number, (place, planted) in enumerate(FAULTS.values(), 1):
        owner, _, name = place.rpartition(".")
        owner = pkgutil.resolve_name(owner)
        setattr(owner, name, _switched(number, getattr(owner, name), planted))


def _switched(number, real, planted):
    @functools.wraps(real)
    def call(*args, **options):
        return planted(real, *args, **options) if _present.value == number else real(*args, **options)

    return call


def switched(questions):
    """Questions of `model_engine.main`; each begins with the fault with which it is answered, or None."""
    for fault, *question in questions:
        _present.value = list(FAULTS).index(fault) + 1 if fault else 0
        yield question
