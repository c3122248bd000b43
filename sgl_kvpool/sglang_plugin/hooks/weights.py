"""Hooks of weight updates: new weights get new keys in stores, and pools take the new k_scales.

SGLang updates weights while it serves, in one call or in a session of several, with or without a flush of its
caches, and a call that fails may have changed weights. From the start of an update on, nothing is stored or
fetched. The next flush outside a session that succeeds ends this: SGLang refuses a flush while a request, a
backup or a prefetch is under way, so no page of the old weights gets a key of the new ones. Only decode
servers that store what they generate may have such pages left; these keep the old name, or are not stored.
"""

import logging
import secrets

from sgl_kvpool.sglang_plugin.options import config_of
from sgl_kvpool.sglang_plugin.registry import around, uses
from sgl_kvpool.srt.host.served_weights import SERVED
from sgl_kvpool.srt.pool.k_scales import followed_digest, take_k_scales

logger = logging.getLogger(__name__)

_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"

uses(f"{_UPDATER}._select_runners", "pools", takes=("self", "selector"))


def attach() -> None:
    """Name the weights before a store is attached; all ranks attach it at the same time."""
    import torch.distributed as dist
    from sglang.srt.runtime_context import get_server_args

    # Launchers of several machines have drawn several. The ranks of a replica are one world.
    of_replica = secrets.token_hex(16)
    drawn = [config_of(get_server_args()).weights_random or of_replica, of_replica]
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast_object_list(drawn, src=0)
    random, of_replica = drawn
    SERVED.start(_version(), random, of_replica, followed_digest())
    if SERVED.digits:
        logger.info("sgl-kvpool: keys in stores end with %s, which names the weights", SERVED.digits)


def _version() -> str:
    from sglang.srt.runtime_context import get_serving

    return get_serving().weight_version


@around(f"{_UPDATER}.update_weights_from_disk", "pools")
@around(f"{_UPDATER}.update_weights_from_ipc", "pools")
def _update_weights(original, self, recv_req):
    """An update of one call, which flushes at its end if the request says so."""
    SERVED.begin(_version())
    return original(self, recv_req)


@around(f"{_UPDATER}.begin_weight_update", "pools")
def _begin_weight_update(original, self, recv_req):
    """Open a session; until it ends, any process may write the weights."""
    if self._session is None:
        SERVED.begin(_version(), session=True)
    return original(self, recv_req)


@around(f"{_UPDATER}.update_weights_from_distributed", "pools")
@around(f"{_UPDATER}.update_weights_from_tensor", "pools")
def _load_bucket(original, self, recv_req):
    """Load some of a session's weights; SGLang refuses the call without a session."""
    if self._session is None:
        return original(self, recv_req)
    SERVED.begin_load()
    result = original(self, recv_req)
    SERVED.end_load()
    return result


@around(f"{_UPDATER}.end_weight_update", "pools", repairs="since #28001; none reported")
def _end_weight_update(original, self, recv_req):
    """End a session, and repeat the flush of its last call: SGLang has changed the weights' form since."""
    if self._session is None:
        return original(self, recv_req)
    result = original(self, recv_req)
    if SERVED.end():
        self.flush_cache(empty_cache=False)
    return result


@around(f"{_UPDATER}.record_weight_version_after_update", "pools")
def _record_weight_version_after_update(original, self, weight_version):
    """SGLang calls this after each load that has succeeded, also without a version."""
    SERVED.loaded(weight_version)
    return original(self, weight_version)


@around(f"{_SCHEDULER}.handle_update_weight_version", "pools")
def _handle_update_weight_version(original, self, recv_req):
    """A new version alone announces weights that changed without a load."""
    SERVED.renamed(recv_req.new_version, _version())
    return original(self, recv_req)


@around(f"{_UPDATER}.check_weights", "pools")
def _check_weights(original, self, recv_req):
    """SGLang's check may overwrite the weights, to see whether a later update replaces all of them."""
    if recv_req.action == "reset_tensors":
        SERVED.begin(_version())
    return original(self, recv_req)


@around(f"{_UPDATER}.resume_memory_occupation", "pools")
def _resume_memory_occupation(original, self, recv_req):
    """Weights that were released without a copy in host memory come back with any contents."""
    from sglang.srt.constants import GPU_MEMORY_TYPE_WEIGHTS
    from sglang.srt.runtime_context import get_exec

    features = get_exec().features
    released = not recv_req.tags or GPU_MEMORY_TYPE_WEIGHTS in recv_req.tags
    if released and features.enable_memory_saver and not features.enable_weights_cpu_backup:
        SERVED.begin(_version())
    return original(self, recv_req)


@around(f"{_SCHEDULER}.flush_cache", "pools", reads=("empty_cache",))
def _flush_cache(original, self, *args, **kwargs):
    """After a flush that succeeded, take the k_scales of the new weights and name them."""
    if not original(self, *args, **kwargs):
        return False

    def settle() -> str:
        take_k_scales(self)
        if SERVED.has_store:
            from sglang.srt.managers.cache_controller import StorageOperation

            SERVED.first_operation = StorageOperation.counter
        return followed_digest()

    if SERVED.flushed(settle):
        beliefs = getattr(self.tree_cache, "storage_existence_cache", None)
        if beliefs is not None:
            beliefs.clear()  # of keys that contain the old name
        if SERVED.has_store:
            logger.info(
                "sgl-kvpool: caches were flushed after an update of weights; keys in stores end with %s now",
                SERVED.digits,
            )
    return True
