"""`sgl-kvpool doctor --self-check`: every layout over small pools, without a model."""

import json
import re
import subprocess
import sys

from codec_oracle import LAYOUTS, narrower
from pools import ARRANGEMENTS
from test_doctor import PROBES, run

#: Layouts that are narrower than that of the device, for its host tier.
NARROWER = {layout: narrower(layout) for layout in LAYOUTS}
SPARSE = [f"{layout}, sparse" for layout in LAYOUTS]
#: Of one of two ranks.
RANKS = {layout: f"{layout} page_major, --dcp-size 2" for layout in LAYOUTS}
WITH_TIER = [
    *(f"{layout} {arrangement}" for layout in LAYOUTS for arrangement in ARRANGEMENTS),
    *(f"{layout}, host {host}" for layout, hosts in NARROWER.items() for host in hosts),
    *RANKS.values(),
    *SPARSE,
]


def test_every_layout_passes():
    done = run("--self-check", "--json", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout + done.stderr
    probes = json.loads(done.stdout)["probes"]
    assert list(probes) == [*PROBES, "self-check"]
    facts = probes["self-check"]["facts"]
    on_cpu = facts.pop("device") == "cpu"
    assert sorted(facts) == sorted(WITH_TIER)
    attention = "rows of 3 of 3 layers, attention of 3 requests with a largest error of "
    for name, found in facts.items():
        tier = ", 2 pages to the host tier and back" if on_cpu else ".*"
        assert re.fullmatch(rf"passed in \d+\.\d\d s: {attention}\S+{tier}", found), (name, found)


def test_a_layout_that_fails_does_not_hide_the_others():
    """An encoder that is wrong for `fp4` alone, in a process of its own."""
    code = """
from sgl_kvpool.srt.pool import mla
store = mla.store_rows
def broken(rows, slots, nope, rope, fmt, **named):
    store(rows, slots, nope * 2 if fmt.layout == "fp4" else nope, rope, fmt, **named)
mla.store_rows = broken
from sgl_kvpool.commands.doctor.self_check import self_check
import json
print("@" + json.dumps(self_check()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    facts, problems = json.loads(done.stdout.rpartition("@")[2])
    failed = [name for name, found in facts.items() if found == "failed"]
    with_host = [f"fp4, host {host}" for host in narrower("fp4")]
    assert failed == [*(f"fp4 {one}" for one in ARRANGEMENTS), *with_host, RANKS["fp4"], "fp4, sparse"]
    assert len(facts) == 1 + len(WITH_TIER)
    for name, problem in zip(failed, problems, strict=True):
        assert problem.startswith(f"{name}: rows of fp4 written to the pool: byte ")
        assert problem.endswith("; do not serve this, and report it")
