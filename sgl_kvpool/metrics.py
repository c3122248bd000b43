"""Metrics of this package for SGLang's Prometheus endpoint, and the list of survivable failures.

SGLang collects metrics of all its processes through files (prometheus_client's multi-process mode), so what a
scheduler counts here appears under `/metrics` of the server without further setup. `publish`, which a
scheduler calls if the server was started with `--enable-metrics`, exposes the counts.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any

from sgl_kvpool.version import VERSION

logger = logging.getLogger(__name__)

__all__ = ["FAILURES", "failed", "publish", "transferred"]

#: Log message of each kind of failure, which ends with the consequence.
FAILURES = {
    "codec_build": "the CPU codec could not be built; torch encodes rows, several times slower",
    "engine_build": "an engine could not be built; the torch engine is used",
    "registration": "host memory could not be pinned; transfers use pageable memory",
    "load_pages": "a load from the host tier named bad pages; the tokens are computed again",
    "load_elsewhere": "a load from the host tier is a miss on another rank; the tokens are computed again",
    "load": "a load by the engine failed; the torch engine carried it out",
    "backup_pages": "a backup to the host tier named bad pages; the tokens are not backed up",
    "backup": "a backup by the engine failed; the torch engine carried it out",
    "backup_lost": "a backup failed; the tokens are not backed up",
    "tier_disagreement": "ranks that share a host tier allocated different pages; the tier is no longer used",
    "page_checksum": "a stored page was not what was stored under its key; the tokens are computed again",
    "page_read": "a stored page could not be read; unless a retry succeeds, the tokens are computed again",
    "page_write": "a page could not be stored",
    "peer_mismatch": "a prefill server has other rows than this decode server; its request failed",
}

_metrics: dict[str, Any] = {}
#: Failures by kind before `publish`: the codec is built before the first pool is complete.
_before_publish: Counter[str] = Counter()


def publish(*, layout: str, host_layout: str, arrangement: str, backend: str) -> None:
    """Expose the counts, and set `sgl_kvpool_info`. A second call in the same process only sets it again.

    Parameters
    ----------
    layout, host_layout, arrangement : str
        Values of the labels; `host_layout` is "none" without a host tier.
    backend : str
        Name of the attention backend.
    """
    # Imported late: it reads PROMETHEUS_MULTIPROC_DIR, which SGLang sets before it starts schedulers.
    import prometheus_client
    from prometheus_client import Gauge

    if not _metrics:
        labels = ["direction", "engine"]
        _metrics["info"] = Gauge(
            "sgl_kvpool_info",
            "What this server stores in its KV cache",
            ["layout", "host_layout", "arrangement", "backend", "version"],
            multiprocess_mode="max",
        )
        _metrics["bytes"] = prometheus_client.Counter(
            "sgl_kvpool_transfer_bytes", "Bytes moved between device and host tier", labels
        )
        _metrics["seconds"] = prometheus_client.Counter(
            "sgl_kvpool_transfer_seconds", "Seconds that transfers between device and host tier took", labels
        )
        _metrics["rate"] = Gauge(
            "sgl_kvpool_transfer_gigabytes_per_second",
            "Rate of the latest transfer, 1e9 bytes per second",
            labels,
            multiprocess_mode="mostrecent",
        )
        _metrics["failures"] = prometheus_client.Counter(
            "sgl_kvpool_failures", "Failures that the server survived, by kind (docs/operating.md)", ["kind"]
        )
        for kind in FAILURES:
            _metrics["failures"].labels(kind=kind).inc(_before_publish.pop(kind, 0))
    _metrics["info"].labels(
        layout=layout, host_layout=host_layout, arrangement=arrangement, backend=backend, version=VERSION
    ).set(1)


def transferred(direction: str, engine: str, size_bytes: int, seconds: float) -> None:
    """Count a transfer.

    Parameters
    ----------
    direction : str
        "to_host" or "to_device".
    engine : str
    size_bytes : int
    seconds : float
        Time from the start of the transfer until its bytes have arrived.
    """
    if not _metrics:
        return
    labels: Mapping[str, str] = {"direction": direction, "engine": engine}
    _metrics["bytes"].labels(**labels).inc(size_bytes)
    _metrics["seconds"].labels(**labels).inc(seconds)
    if seconds > 0:
        _metrics["rate"].labels(**labels).set(size_bytes / seconds / 1e9)


def failed(kind: str, what: str, *, error: BaseException | None = None) -> None:
    """Log and count a failure that the server survives.

    Parameters
    ----------
    kind : str
        Key of `FAILURES`.
    what : str
        The object and the operation that failed, for the log.
    error : exception, optional
        The exception that caused the failure.

    Raises
    ------
    KeyError
        If `kind` is not in the table.
    """
    cost = FAILURES[kind]
    reason = "" if error is None else f": {type(error).__name__}: {error}"
    logger.warning("sgl-kvpool: %s (%s)%s", cost, what, reason)
    if _metrics:
        _metrics["failures"].labels(kind=kind).inc()
    else:
        _before_publish[kind] += 1
