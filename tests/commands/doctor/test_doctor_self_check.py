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
SPARSE += [f"{sparse}, --dcp-size 2" for sparse in SPARSE if not sparse.startswith("fp8,")]
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
    """Code that is wrong for one layout each, in a process of its own: the encoder, the rule by which ranks
    store tokens, and the pages of index keys of ranks."""
    code = """
from sgl_kvpool.srt.pool import mla, regions, row_pool
store = mla.store_rows
def broken(rows, slots, nope, rope, fmt, **named):
    store(rows, slots, nope * 2 if fmt.layout == "fp4" else nope, rope, fmt, **named)
mla.store_rows = broken
rows_to_write = row_pool.RowPool.rows_to_write
def of_all_ranks(pool, slots):
    every = pool.kv_cache_layout == "bf16" and pool.dcp_size > 1
    return pool.slot_to_row(slots // pool.dcp_size) if every else rows_to_write(pool, slots)
row_pool.RowPool.rows_to_write = of_all_ranks
keys = regions.PoolReader._index_references
def of_one_rank(self, pool, layer_ids, page):
    short = pool.kv_cache_layout == "fp8_block_scale"
    return keys(self, pool, layer_ids, page // pool.dcp_size if short else page)
regions.PoolReader._index_references = of_one_rank
from sgl_kvpool.commands.doctor.self_check import self_check
import json
print("@" + json.dumps(self_check()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    facts, problems = json.loads(done.stdout.rpartition("@")[2])
    failed = [name for name, found in facts.items() if found == "failed"]
    assert len(facts) == 1 + len(WITH_TIER)
    of_ranks = {layout: f"{layout}, sparse, --dcp-size 2" for layout in LAYOUTS}
    assert set(failed) == {
        *(name for name in WITH_TIER if name.startswith(("fp4 ", "fp4,"))),
        *(RANKS["bf16"], of_ranks["bf16"], of_ranks["fp8_block_scale"]),
    }
    for name, problem in zip(failed, problems, strict=True):
        what = f"rows of {name.split(maxsplit=1)[0].rstrip(',')} written to the pool: byte "
        if name == of_ranks["fp8_block_scale"]:
            what = "index keys in the host tier: (2, 25344) bytes were read, expected (2, 50688)"
        assert problem.startswith(f"{name}: {what}")
        assert problem.endswith("; do not serve this, and report it")
