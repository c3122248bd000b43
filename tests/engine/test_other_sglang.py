"""Real servers on a release of SGLang that this package was not tested with: `make test-other-sglang`.

The environment has the packages of constraints.txt but for SGLang itself. On a release that is not in
`REFUSED_BY`, one to port to, everything has to work.
"""

import json
import os
import re
from pathlib import Path

import pytest
from live_processes import ran
from programs import clean_environment

from sgl_kvpool.commands.evaluate.measure import generate_greedily
from sgl_kvpool.commands.processes.server import DEMO_MODELS, Server, cpu_arguments, free_port
from sgl_kvpool.demo.model import model_path

pytestmark = pytest.mark.other_sglang

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
VERSION = os.environ.get("OTHER_SGLANG")
PYTHON = ROOT / f".venv-{VERSION}" / "bin" / "python"
UNTESTED = {"KVPOOL_ALLOW_UNTESTED": "1"}
LAYOUT = ("--kv-cache-layout", "fp4")
TIER = "--enable-hierarchical-cache"
#: Release -> the hook group that refuses a server with a layout, and one with the host tier besides.
REFUSED_BY = {"0.5.21": ("arguments", "arguments"), "0.5.22": (None, "host tier")}
GROUPS = list(zip([(), (TIER,)], REFUSED_BY.get(VERSION, (None, None)), strict=True))


def environment(**more):
    assert PYTHON.exists(), "run `make test-other-sglang`, which makes the environment"
    return clean_environment(KVPOOL_PREFILL_READS_ROWS="1", **more)


def refused(*arguments, **more):
    """Output of a server that refuses to start; it has to end by itself."""
    command = [PYTHON, "-m", "sglang.launch_server", *cpu_arguments(model_path(), free_port()), *arguments]
    variables = {"PATH": "/usr/bin:/bin", "HOME": str(Path.home()), "CUDA_VISIBLE_DEVICES": ""}
    variables |= {"SGLANG_EXTERNAL_MODEL_PACKAGE": DEMO_MODELS, **environment(**more)}
    done = ran(*map(str, command), env=variables)
    assert done.returncode == 1
    assert "Load weight" not in done.stdout + done.stderr
    return done.stderr


@pytest.mark.parametrize("more", [more for more, group in GROUPS if group is None])
def test_dense_mla_serves_the_same_tokens_with_the_opt_in(tmp_path, more):
    goldens = json.loads((HERE / "goldens.json").read_text())
    arguments = [*cpu_arguments(model_path(), free_port(), 22656), *LAYOUT, *more, "--page-size", "64"]
    log = tmp_path / "server.log"
    program = (str(PYTHON), "-m", "sglang.launch_server")
    with Server(arguments, log, environment(**UNTESTED), program=program) as server:
        info = server.info()
        found = generate_greedily(server, goldens["prompts"], 48)
    assert info["version"] == VERSION
    assert info["kv_cache_layout"] == "fp4"
    assert "sgl-kvpool: KV cache layout fp4: 416 bytes per token and layer" in log.read_text()
    expected = goldens["greedy"]["fp4"]
    # Where a margin is within bfloat16's rounding of the logits, another CPU may give another token.
    wide = [number for number, golden in enumerate(expected) if golden["smallest_margin"] > 0.1]
    assert len(wide) >= 4
    assert [found[n].token_ids for n in wide] == [expected[n]["token_ids"] for n in wide]


@pytest.mark.parametrize(("more", "group"), [(more, group) for more, group in GROUPS if group])
def test_a_server_whose_hook_group_does_not_work_is_refused_by_its_name(more, group):
    last = refused(*LAYOUT, *more, **UNTESTED).rstrip().splitlines()[-1]
    assert last.startswith(f"sgl-kvpool: hook group '{group}' does not work on SGLang {VERSION}: sglang.srt.")
    way_out = TIER if group == "host tier" else "the arguments and environment variables of sgl-kvpool"
    assert re.search(rf"[0-9]+ more, which `sgl-kvpool doctor` lists\); leave out {way_out}", last)


@pytest.mark.parametrize("more", [(), (TIER,)])
def test_without_the_opt_in_everything_is_refused(more):
    said = [line for line in refused(*LAYOUT, *more).splitlines() if "was requested" in line]
    assert said[-1].startswith(
        f"sgl-kvpool: a KV cache layout was requested, but SGLang {VERSION} is not a version this release "
        "was tested with (sglang>=0.5.23,<0.5.24)"
    )


def test_doctor_names_what_differs_and_the_page_the_groups_that_do_not_work():
    done = ran(PYTHON, "-m", "sgl_kvpool", "doctor", "--json")
    assert done.returncode == 1
    found = json.loads(done.stdout)["probes"]["hook points"]
    failing = [problem.partition(": ")[0] for problem in found["problems"]]
    assert bool(failing) == (VERSION in REFUSED_BY)
    page = " ".join((ROOT / "docs" / "compatibility.md").read_text().split())
    if VERSION == "0.5.22":
        assert f"On {VERSION} these hook groups do not work: {', '.join(failing)}." in page
        titles = [note.partition(": ")[0] for note in found["notes"]]
        kinds = ("changed arguments", "new arguments", "removed arguments")
        assert titles == [*kinds, "changed sources", "new sources", "removed sources"]
        assert "; managers.scheduler.Scheduler: __init__, get_init_info; " in found["notes"][3]
    assert len(done.stdout.splitlines()) < 200
