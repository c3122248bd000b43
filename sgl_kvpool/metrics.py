"""Metrics of this package for SGLang's Prometheus endpoint, and the log of what they count by kind.

SGLang collects metrics of all its processes through files (prometheus_client's multi-process mode), so what a
scheduler counts here appears under `/metrics` of the server without further setup. `publish`, which a
scheduler calls if the server was started with `--enable-metrics`, exposes the counts.
"""

import logging
from collections import Counter
from typing import Any

from sgl_kvpool.events import FAILURES, METRICS, UNCACHED
from sgl_kvpool.version import VERSION

logger = logging.getLogger(__name__)

_metrics: dict[str, Any] = {}
#: Counts by kind or reason before `publish`: the codec is built before the first pool is complete.
_before_publish: Counter[str] = Counter()
#: Reasons that this process has logged.
_logged: set[str] = set()


def publish(**labels: str | int) -> None:
    """Expose the counts, and set `sgl_kvpool_info`. A second call in the same process only sets it again.

    `labels` are those of `sgl_kvpool_info` without the version.
    """
    # Imported late: it reads PROMETHEUS_MULTIPROC_DIR, which SGLang sets before it starts schedulers.
    import prometheus_client

    if not _metrics:
        for key, one in METRICS.items():
            _metrics[key] = (
                prometheus_client.Gauge(one.name, one.help, one.labels, multiprocess_mode=one.gauge_mode)
                if one.gauge_mode
                else prometheus_client.Counter(one.name, one.help, one.labels)
            )
        for kind in FAILURES:
            _metrics["failures"].labels(kind=kind).inc(_before_publish.pop(kind, 0))
        for reason in UNCACHED:
            _metrics["uncached"].labels(reason=reason).inc(_before_publish.pop(reason, 0))
    _metrics["info"].labels(**labels, version=VERSION).set(1)


def transferred(direction: str, engine: str, size_bytes: int, seconds: float) -> None:
    """Count a transfer, from its start until its bytes have arrived."""
    if not _metrics:
        return
    _metrics["bytes"].labels(direction, engine).inc(size_bytes)
    _metrics["seconds"].labels(direction, engine).inc(seconds)
    if seconds > 0:
        _metrics["rate"].labels(direction, engine).set(size_bytes / seconds / 1e9)


def failed(kind: str, what: str, *, error: BaseException | None = None) -> None:
    """Log and count a failure that the server survives, by its `kind` in `events.FAILURES`.

    `what` names the object and the operation that failed, for the log, and `error` is the cause.
    """
    message = FAILURES[kind].message
    reason = "" if error is None else f": {type(error).__name__}: {error}"
    logger.warning("sgl-kvpool: %s (%s)%s", message, what, reason)
    if _metrics:
        _metrics["failures"].labels(kind=kind).inc()
    else:
        _before_publish[kind] += 1


def uncached(reason: str, pages: int, what: str) -> None:
    """Count pages that are not cached for a `reason` in `events.UNCACHED`; log the first with its remedy.

    `what` names the object and the numbers of this event, for the log.
    """
    event = UNCACHED[reason]
    if reason not in _logged:
        _logged.add(reason)
        text = "sgl-kvpool: %s (%s); %s. sgl_kvpool_uncached_pages_total{reason=%r} counts on"
        logger.warning(text, event.message, what, event.remedy.replace("`", ""), reason)
    if _metrics:
        _metrics["uncached"].labels(reason=reason).inc(pages)
    else:
        _before_publish[reason] += pages
