"""Counts of failures before and after a scheduler exposes them."""

import subprocess
import sys

PROCESS = """
from prometheus_client import REGISTRY
from sgl_kvpool import metrics

def count(kind):
    return REGISTRY.get_sample_value("sgl_kvpool_failures_total", {"kind": kind})

metrics.failed("codec_build", "the CPU codec")
metrics.failed("codec_build", "the CPU codec")
for _ in range(2):
    metrics.publish(layout="fp4", host_layout="fp4", arrangement="layer_major", backend="kvpool_mla")
    print(count("codec_build"), count("load"))
metrics.failed("codec_build", "the CPU codec")
print(count("codec_build"))
"""


def test_failures_before_the_metrics_are_exposed_are_counted():
    """A scheduler builds the codec before its first pool is complete."""
    done = subprocess.run([sys.executable, "-c", PROCESS], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["2.0 0.0", "2.0 0.0", "3.0"]
