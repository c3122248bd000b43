"""Counts of failures and of pages that are not cached, before and after a scheduler exposes them."""

import subprocess
import sys

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
    assert [line.partition(" (")[0] for line in logged].count(
        f"sgl-kvpool: {FAILURES['codec_build'].message}"
    ) == 3
    of_reason = [line for line in logged if UNCACHED["tier_full"].message in line]
    assert len(of_reason) == 1
    assert f"(3 of 4 pages); {UNCACHED['tier_full'].remedy.replace('`', '')}. " in of_reason[0]
