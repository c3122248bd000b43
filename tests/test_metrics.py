"""Counts of failures and of pages that are not cached, before and after a scheduler exposes them."""

import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

from sgl_kvpool import metrics
from sgl_kvpool.metrics import FAILURES, UNCACHED

PROCESS = """
from prometheus_client import REGISTRY
from sgl_kvpool import metrics

def count(kind):
    return REGISTRY.get_sample_value("sgl_kvpool_failures_total", {"kind": kind})

def uncached():
    return REGISTRY.get_sample_value("sgl_kvpool_uncached_pages_total", {"reason": "tier_full"})

metrics.failed("codec_build", "the CPU codec")
metrics.failed("codec_build", "the CPU codec")
metrics.uncached("tier_full", 3, "3 of 4 pages")
labels = {"layout": "fp4", "host_layout": "fp4", "arrangement": "layer_major", "backend": "kvpool_mla"}
for _ in range(2):
    metrics.publish(**labels, dcp_size=8)
    print(count("codec_build"), count("load"), uncached())
print(REGISTRY.get_sample_value("sgl_kvpool_info", {**labels, "dcp_size": "8", "version": metrics.VERSION}))
metrics.failed("codec_build", "the CPU codec")
metrics.uncached("tier_full", 4, "4 of 4 pages")
print(count("codec_build"), uncached())
"""


def test_events_before_the_metrics_are_exposed_are_counted():
    """A scheduler builds the codec before its first pool is complete; each reason is logged once."""
    done = subprocess.run([sys.executable, "-c", PROCESS], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["2.0 0.0 3.0", "2.0 0.0 3.0", "1.0", "3.0 7.0"]
    logged = done.stderr.splitlines()
    assert sum(f"sgl-kvpool: {FAILURES['codec_build'].message} (" in line for line in logged) == 1
    of_reason = [line for line in logged if UNCACHED["tier_full"].message in line]
    assert len(of_reason) == 1
    assert f"(3 of 4 pages); {UNCACHED['tier_full'].remedy.replace('`', '')}. " in of_reason[0]


def test_equal_failures_are_a_line_a_minute(monkeypatch, caplog):
    """Of each kind; a full disk or a page that every prompt asks for fails thousands of times."""
    clock = SimpleNamespace(monotonic=None)
    monkeypatch.setattr(metrics, "time", clock)
    monkeypatch.setattr(metrics, "_quiet", {})
    monkeypatch.setattr(metrics, "_before_publish", Counter())
    monkeypatch.setattr(metrics, "_metrics", {})

    def fail(_):
        for _ in range(2000):
            metrics.failed("page_write", "128 pages", error=OSError(28, "No space left on device"))

    for now in (1.0, 60.9, 61.1):
        clock.monotonic = lambda now=now: now
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(fail, range(4)))
        metrics.failed("page_read", "1 page")
    assert metrics._before_publish == {"page_write": 24000, "page_read": 3}
    lines = [text.partition(f"{FAILURES['page_write'].message} ")[2] for text in caplog.messages]
    space = "(128 pages): OSError: [Errno 28] No space left on device"
    assert [line for line in lines if line] == [space, f"{space}; 15999 more since the line before"]
    assert len(lines) == 4


SERVER = """
import sys
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from sgl_kvpool import metrics
metrics.publish(layout=sys.argv[1], host_layout="none", arrangement="x", backend="x", dcp_size=1)
metrics.transferred("load", sys.argv[1], 1000, 1.0)
registry = CollectorRegistry()
MultiProcessCollector(registry)
print(generate_latest(registry).decode())
"""


def test_a_server_shows_no_gauges_of_servers_before(tmp_path):
    """The user's PROMETHEUS_MULTIPROC_DIR may outlive a server; gauges of another live rank stay."""

    def shown(layout):
        environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
        command = [sys.executable, "-c", SERVER, layout]
        out = subprocess.run(command, env=environment, text=True, capture_output=True, check=True).stdout
        rates = re.findall(r'gigabytes_per_second{.*engine="(\w+)"', out)
        layouts = re.findall(r'sgl_kvpool_info{.*layout="(?!none)(\w+)"', out)
        assert sorted(rates) == sorted(layouts)
        return {*layouts}

    assert shown("fp4") == {"fp4"}
    for file in tmp_path.glob("gauge_*"):
        # Left by an ended process, whose identifier is in use again; and written by a live one.
        for pid, age in (1, 10**9), (os.getpid(), 0):
            copy = shutil.copy(file, f"{file.parent}/{file.stem.rpartition('_')[0]}_{pid}.db")
            os.utime(copy, (time.time() - age,) * 2)
    assert shown("fp8") == {"fp4", "fp8"}
    for file in tmp_path.glob(f"gauge_*_{os.getpid()}.db"):
        file.unlink()
    assert shown("bf16") == {"bf16"}


def test_files_that_are_no_gauges_of_ours_stay(tmp_path, monkeypatch):
    """Another program may name its processes by words."""
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    modes = {one.gauge_mode for one in metrics.METRICS.values()} - {""}
    others = {tmp_path / f"gauge_{mode}_word.db" for mode in modes}
    for file in others:
        file.touch()
    metrics._remove_gauges_of_ended_processes()
    assert others == {*tmp_path.iterdir()} != set()
