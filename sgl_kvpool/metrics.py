"""Metrics of this package for SGLang's Prometheus endpoint, and tables of what they count by kind.

SGLang collects metrics of all its processes through files (prometheus_client's multi-process mode), so what a
scheduler counts here appears under `/metrics` of the server without further setup. `publish`, which a
scheduler calls if the server was started with `--enable-metrics`, exposes the counts. `docs/reference.md`
has the tables: failures that a server survives, and reasons for uncached pages.
"""

import logging
import os
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sgl_kvpool.version import VERSION

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Event:
    """A row of these tables: the log's text, which ends with the consequence, and what the user can do."""

    message: str
    remedy: str


@dataclass(frozen=True)
class Metric:
    """A metric of Prometheus, with the text of `/metrics`; `name` is without the `_total` of counters."""

    name: str
    help: str
    labels: tuple[str, ...]
    #: prometheus_client's mode for a gauge of several processes; empty for a counter.
    gauge_mode: str = ""

    @property
    def exported_name(self) -> str:
        """Name under which `/metrics` has it."""
        return self.name if self.gauge_mode else f"{self.name}_total"


_TRANSFER = ("direction", "engine")
_ERRORS = {
    "relative_error": "Norm of the errors of stored values over the values', latest sampled prefill",
    "clamped_blocks": "Share of blocks (values of a scale, or a token) with a value beyond the largest",
    "zeroed_values": "Share of the nonzero values that are stored as zero",
}
#: Metrics by the key under which `sgl_kvpool.metrics` sets them.
METRICS = {
    "info": Metric(
        "sgl_kvpool_info",
        "Always 1; labels name what the KV cache stores; host_layout is 'none' without a host tier",
        ("layout", "host_layout", "arrangement", "backend", "dcp_size", "version"),
        gauge_mode="livemax",
    ),
    "bytes": Metric(
        "sgl_kvpool_transfer_bytes",
        "Bytes moved between device and the plugin's host tier, in the host's layout",
        _TRANSFER,
    ),
    "seconds": Metric(
        "sgl_kvpool_transfer_seconds",
        "Seconds that transfers between device and the plugin's host tier took",
        _TRANSFER,
    ),
    "rate": Metric(
        "sgl_kvpool_transfer_gigabytes_per_second",
        "Rate of the latest transfer, 1e9 bytes per second; on a CPU a load is one transfer per layer",
        _TRANSFER,
        gauge_mode="livemostrecent",
    ),
    "failures": Metric("sgl_kvpool_failures", "Failures that the server survived, by kind", ("kind",)),
    "uncached": Metric(
        "sgl_kvpool_uncached_pages",
        "Pages that were not backed up, not stored or not found, by reason",
        ("reason",),
    ),
    "sampled": Metric("sgl_kvpool_sampled_prefills", "Prefills compared, or unseen, by kind", ("kind",)),
    **{
        key: Metric(f"sgl_kvpool_{key}", text, ("rows", "part", "layers"), gauge_mode="livemax")
        for key, text in _ERRORS.items()
    },
}

#: Failures that the server survives, by kind.
FAILURES = {
    "codec_build": Event(
        "the CPU codec could not be built; torch encodes and decodes rows, several times slower",
        "install g++",
    ),
    "attention_build": Event(
        "attention on CPUs could not be built; torch attends decoded rows, several times slower",
        "install g++",
    ),
    "engine_build": Event(
        "an engine could not be built; the torch engine is used",
        "look at the reason. With an explicit `--kv-host-engine` the server ends instead",
    ),
    "registration": Event(
        "host memory could not be pinned; transfers use pageable memory",
        "raise `ulimit -l`, or use a smaller tier",
    ),
    "load_pages": Event(
        "a load from the host tier named bad pages; the tokens are computed again",
        "after `backup_lost`: nothing. Otherwise a bug: report it. With pipeline stages the server ends",
    ),
    "load_elsewhere": Event(
        "a load from the host tier is a miss on another rank; the tokens are computed again",
        "look at the other rank's log. With pipeline stages the server ends",
    ),
    "load": Event(
        "a load by the engine failed; the torch engine carried it out",
        "look at the reason. If torch fails too, the server ends",
    ),
    "backup_pages": Event(
        "a backup to the host tier named bad pages; the tokens are not backed up",
        "a bug: report it",
    ),
    "backup": Event("a backup by the engine failed; the torch engine carried it out", "look at the reason"),
    "backup_lost": Event(
        "a backup failed; the tokens are not backed up",
        "look at the reason. A prefix that contains a lost page is a miss until SGLang drops it from the "
        "host",
    ),
    "tier_disagreement": Event(
        "ranks that share a host tier allocated different pages; the tier is no longer used",
        "restart the server, and report the operation that the log names. All pages are misses; answers stay "
        "right",
    ),
    "page_checksum": Event(
        "a stored page was not what was stored under its key; the tokens are computed again",
        "remove the page whose key the log names (`rm STORE/KEY_*` for `file`), which is a miss at every "
        "request until then; look for two models under one name",
    ),
    "page_read": Event(
        "a stored page could not be read; unless a retry succeeds, the tokens are computed again",
        "look at the store: the page is unreadable or too short, or was removed after SGLang had asked for "
        "it",
    ),
    "page_write": Event(
        "a page could not be stored",
        "after `backup_lost`: nothing. Otherwise usually a full disk or missing permission",
    ),
    "peer_mismatch": Event(
        "a prefill server has other rows than this decode server; its request failed",
        "start both with the same layout, page size, pipeline stages, release and checkpoint",
    ),
}

#: Reasons why pages are not backed up, not stored or not found although nothing failed.
UNCACHED: dict[str, Event] = {
    "tier_full": Event(
        "the host tier has no room for a prompt; its pages are neither backed up nor stored",
        "give a larger `--hicache-ratio`, `--hicache-size` or `--hicache-host-memory-fraction`: a tier with "
        "fewer tokens than the pool is full of pages that are still on the device. Or give "
        "`--hicache-write-policy write_back`, which backs up what leaves the device",
    ),
    "prompt_too_long": Event(
        "a prompt is longer than the host tier; its pages are neither backed up nor stored",
        "give a larger `--hicache-ratio`, `--hicache-size` or `--hicache-host-memory-fraction`, or a smaller "
        "`--chunked-prefill-size`: a prompt is backed up chunk by chunk",
    ),
    "store_slow": Event(
        "a store does not answer; until it does, its pages are misses and further pages are not stored",
        "look at the store (a dead mount, a FIFO among its files, a network). While a call hangs, "
        "`/flush_cache` ends the server and the store cannot be detached: restart the server",
    ),
    "weights": Event(
        "weights may have changed, and the caches were not flushed since; pages are not stored",
        "call `/flush_cache` until it returns 200; requests of the old weights have to end first",
    ),
}

_metrics: dict[str, Any] = {}
#: Counts by kind or reason before `publish`: the codec is built before the first pool is complete.
_before_publish: Counter[str] = Counter()
#: Reasons that this process has logged.
_logged: set[str] = set()
#: Kind of failure -> when its next line may be logged (monotonic), and failures since its latest line.
_quiet: dict[str, tuple[float, int]] = {}
_LINE_SECONDS = 60.0
#: Guards all of these: engines and stores have threads of their own.
_lock = threading.Lock()


def publish(**labels: str | int) -> None:
    """Expose the counts, and set `sgl_kvpool_info`. A second call in the same process only sets it again.

    `labels` are those of `sgl_kvpool_info` without the version.
    """
    # Imported late: it reads PROMETHEUS_MULTIPROC_DIR, which SGLang sets before it starts schedulers.
    import prometheus_client

    with _lock:
        if not _metrics:
            _remove_gauges_of_ended_processes()
            for key, one in METRICS.items():
                _metrics[key] = (
                    prometheus_client.Gauge(one.name, one.help, one.labels, multiprocess_mode=one.gauge_mode)
                    if one.gauge_mode
                    else prometheus_client.Counter(one.name, one.help, one.labels)
                )
            for key, values in (("failures", FAILURES), ("uncached", UNCACHED)):
                for value in values:
                    _metrics[key].labels(value).inc(_before_publish.pop(value, 0))
    _metrics["info"].labels(**labels, version=VERSION).set(1)


def _remove_gauges_of_ended_processes() -> None:
    """Remove what servers before left in the user's PROMETHEUS_MULTIPROC_DIR, also by a PID in use again."""
    import psutil

    folder = Path(os.environ.get("PROMETHEUS_MULTIPROC_DIR", os.devnull))
    began = {each.pid: each.info["create_time"] for each in psutil.process_iter(["create_time"])}
    for file in [file for one in METRICS.values() for file in folder.glob(f"gauge_{one.gauge_mode}_*.db")]:
        with suppress(OSError, ValueError):  # removed by another rank; a folder; a name that is no PID's
            if file.stat().st_mtime < began.get(int(file.stem.rpartition("_")[2]), time.time()):
                file.unlink()


def transferred(direction: str, engine: str, size_bytes: int, seconds: float) -> None:
    """Count a transfer, from its start until its bytes have arrived."""
    if not _metrics:
        return
    _metrics["bytes"].labels(direction, engine).inc(size_bytes)
    _metrics["seconds"].labels(direction, engine).inc(seconds)
    if seconds > 0:
        _metrics["rate"].labels(direction, engine).set(size_bytes / seconds / 1e9)


def sampled(kind: str) -> None:
    """Count a prefill of `--kv-error-sample`, with which metrics are exposed."""
    _metrics["sampled"].labels(kind).inc()


def shown(*labels: str, **values: float) -> None:
    """Set gauges by their keys in `METRICS`."""
    for key, value in values.items():
        _metrics[key].labels(*labels).set(value)


def failed(kind: str, what: str, *, error: BaseException | None = None) -> None:
    """Count a failure that the server survives, by its `kind` in `FAILURES`; log one of a kind a minute.

    `what` names the object and the operation that failed, for the log, and `error` is the cause.
    """
    now = time.monotonic()
    with _lock:
        if _metrics:
            _metrics["failures"].labels(kind=kind).inc()
        else:
            _before_publish[kind] += 1
        until, left_out = _quiet.get(kind, (0.0, 0))
        _quiet[kind] = (until, left_out + 1) if now < until else (now + _LINE_SECONDS, 0)
    if now >= until:
        reason = "" if error is None else f": {type(error).__name__}: {error}"
        more = f"; {left_out} more since the line before" if left_out else ""
        logger.warning("sgl-kvpool: %s (%s)%s%s", FAILURES[kind].message, what, reason, more)


def uncached(reason: str, pages: int, what: str) -> None:
    """Count pages that are not cached for a `reason` in `UNCACHED`; log the first with its remedy.

    `what` names the object and the numbers of this event, for the log.
    """
    event = UNCACHED[reason]
    with _lock:
        is_first = reason not in _logged
        _logged.add(reason)
        if _metrics:
            _metrics["uncached"].labels(reason=reason).inc(pages)
        else:
            _before_publish[reason] += pages
    if is_first:
        text = "sgl-kvpool: %s (%s); %s. sgl_kvpool_uncached_pages_total{reason=%r} counts on"
        logger.warning(text, event.message, what, event.remedy.replace("`", ""), reason)
