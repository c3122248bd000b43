"""The hook points in the installed SGLang, and the behaviour on another version."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import forks
import pytest
from sglang.srt.server_args import ServerArgs

from sgl_kvpool.sglang_plugin import hook_points
from sgl_kvpool.sglang_plugin.hook_groups import ARGUMENTS
from sgl_kvpool.sglang_plugin.hook_points import check
from sgl_kvpool.sglang_plugin.registry import HookPoint

ROOT = Path(__file__).resolve().parents[2]
# Two processes import SGLang and are forked for each test.
pytestmark = pytest.mark.slow

#: SGLang's first action with plugins, in a separate process.
LOAD = "import sys; sys.argv = {argv!r}; from sglang.srt.plugins import load_plugins; load_plugins(); "


@pytest.fixture(scope="module")
def scheduler(tmp_path_factory, launcher):
    """Like `launcher`, after the imports of a scheduler's process."""
    modules = ("sglang.srt.managers.scheduler", "sglang.srt.plugins")
    folder = tmp_path_factory.mktemp("scheduler")
    with forks.Forks(*modules, output=folder, environment=launcher.environment) as process:
        yield process


@pytest.mark.usefixtures("launcher", "scheduler")  # their processes import meanwhile
def test_all_hook_points_hold_in_this_sglang():
    code = "from sgl_kvpool.commands.doctor import probes; print(probes.hook_points())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "problems=[], notes=[]" in done.stdout, f"run `python -m scripts.fingerprint`: {done.stdout}"
    assert re.search(r"'checked': (\d{3}), 'hold': \1}", done.stdout), done.stdout


def test_check_names_what_differs():
    taken = (("gone", "source"), ("source", "server_args"), ("server_args", "source"))
    points = [HookPoint("sglang.srt.arg_groups.overrides.declare_resolution", names) for names in taken]
    gone = [HookPoint("sglang.srt.server_args.ServerArgs.gone"), HookPoint("sglang.srt.not_there.thing")]
    first, second, third, fourth = check([*gone, *points])
    assert "ServerArgs.gone: not there" in first
    assert "sglang.srt.not_there.thing: not there" in second
    assert "takes no gone in" in third
    assert "takes no server_args" in fourth  # it is there, but before `source`


def test_a_hook_that_was_not_applied_is_noticed():
    point = HookPoint("sglang.srt.server_args.ServerArgs.check_server_args")
    assert check([point]) == []
    assert check([point], applied=True) == [f"{point.target}: the hook was not applied"]


def test_another_version_with_nothing_asked_for_warns_once_and_hooks_nothing(launcher, other_sglang):
    code = LOAD.format(argv=["x"]) + (
        "from sglang.srt.server_args import ServerArgs as S;"
        "from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES as C;"
        "from sglang.srt.arg_groups.resolution_hooks import _HOOKS as H;"
        "marks = [hasattr(f, '_sgl_kvpool_hook') for f in (S.add_cli_args, S.from_cli_args)];"
        "print('hooked', marks, 'kvpool_mla' in C, [f for v in H.values() for f in v])"
    )
    done = launcher.run(code, PYTHONPATH=str(other_sglang))
    assert done.returncode == 0, done.stderr
    assert "hooked [False, False] False []" in done.stdout
    assert done.stderr.count("SGLang 0.6.1 is not a version") == 1


#: Code that breaks SGLang before its plugins are loaded.
RENAMED_STEP = (
    "import sglang.srt.arg_groups.resolution_hooks as r;"
    "r._OVERRIDABLE_HOOKS = r._OVERRIDABLE_HOOKS - {'handle_deprecated_dp_attention'};"
)
OTHER_FAILURE = "import sglang.srt.arg_groups.choices as c; c.add_attention_backend_choices = None;"
NO_POOL_CLASS = (
    "import sglang.srt.mem_cache.kv_cache_configurator as k;del k.KVCacheConfigurator._resolve_kv_pool_class;"
)
NO_TOPK = (
    "import sglang.srt.layers.attention.dsa_backend as d;"
    "del d.DeepseekSparseAttnBackend.get_topk_transform_method;"
)
#: The comparison with the tested SGLang takes half a minute, and test_fingerprint.py has it.
COMPARED = (
    "from sgl_kvpool.sglang_plugin import fingerprint;"
    "fingerprint._compared = lambda: ['new arguments: rows=0; x=1'];"
)
WITHOUT_POINT = NO_POOL_CLASS + LOAD.format(argv=["x"]) + "print('went on')"
GROUPS = "_KVPOOL_CHILD_HOOK_GROUPS"
FP4 = "--kv-cache-layout fp4"

LAYOUT, ARRANGEMENT = (f"a KV cache {kind} was requested" for kind in ("layout", "arrangement"))
LAYOUT_NAME = "KVPOOL_KV_CACHE_LAYOUT"
UNKNOWN = f"the nearest is {LAYOUT_NAME}: set"
#: Process (of another SGLang, of this one, a scheduler), code before, arguments, environment, last line.
STOPPED = [
    ("other", COMPARED, FP4, {}, LAYOUT),
    ("other", COMPARED, "--kv-cache-layout=fp4", {}, LAYOUT),
    ("other", COMPARED, "", {"KVPOOL_KV_CACHE_LAYOUT": "fp4"}, LAYOUT),
    ("other", COMPARED, "--kv-cache-arrangement token_major", {}, ARRANGEMENT),
    ("other", COMPARED, "", {"KVPOOL_KV_CACHE_ARRANGEMENT": "token_major"}, ARRANGEMENT),
    ("other", COMPARED, "", {"KVPOOL_FIX_TOPK": "1"}, "KVPOOL_FIX_TOPK=1 was requested"),
    ("other", COMPARED, "", {"KVPOOL_PREFILL_READS_ROWS": "1"}, "KVPOOL_PREFILL_READS_ROWS=1 was requested"),
    # SGLang copies SGL_X to SGLANG_X; only the name that the user wrote is reported.
    ("other", COMPARED, "", dict.fromkeys((f"SGL_{LAYOUT_NAME}", f"SGLANG_{LAYOUT_NAME}"), "x"), UNKNOWN),
    ("this", "", "", {"KVPOOL_KV_CACHE_LAYUOT": "x"}, UNKNOWN),
    ("this", "", "", {f"SGLANG_{LAYOUT_NAME}": "x"}, UNKNOWN),
    ("this", RENAMED_STEP, FP4, {}, "has no handle_deprecated_dp_attention"),
    ("this", OTHER_FAILURE, FP4, {}, "the plugin failed: TypeError"),
    # SGLang swallows other exceptions of a plugin.
    ("scheduler", NO_POOL_CLASS, "", {GROUPS: "pools"}, "Configurator._resolve_kv_pool_class: not there"),
    # Another version of this package was installed after the launcher started.
    ("scheduler", "", "", {GROUPS: "pools, x"}, "KeyError('x')"),
    ("scheduler", "", "", {"KVPOOL_FIX_TOPK": "maybe"}, "KVPOOL_FIX_TOPK='maybe' is neither"),
    ("scheduler", NO_TOPK, "", {"KVPOOL_FIX_TOPK": "1"}, "get_topk_transform_method: not there"),
]


@pytest.mark.parametrize(("process", "breakage", "argv", "environment", "text"), STOPPED)
def test_a_process_that_cannot_serve_what_was_requested_stops(
    request, other_sglang, process, breakage, argv, environment, text
):
    start = request.getfixturevalue("scheduler" if process == "scheduler" else "launcher").run
    path = {"PYTHONPATH": str(other_sglang)} if process == "other" else {}
    code = f"{breakage}{LOAD.format(argv=['x', *argv.split()])}print('went on')"
    done = start(code, **environment, **path)
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    assert text in done.stderr
    assert done.stderr.count("is not a variable of sgl-kvpool") == ("nearest" in text)
    assert "nearest" not in text or "Traceback" not in done.stderr
    if "was requested" in text:
        assert f"{text}, but SGLang 0.6.1 is not a version" in done.stderr
        assert "sglang>=0.5.23,<0.5.24" in done.stderr
        assert "KVPOOL_ALLOW_UNTESTED=1" in done.stderr
        assert done.stderr.endswith("\nsgl-kvpool: new arguments: rows=0; x=1\n")


@pytest.mark.parametrize(
    ("process", "argv", "environment"),
    [
        ("tested", FP4, {}),
        ("other", FP4, {"KVPOOL_ALLOW_UNTESTED": "1"}),
        ("other", "--kv-cache-layout auto", {}),
        ("other", "--kv-cache-arrangement=auto", {}),
        ("other", "", {"KVPOOL_PREFILL_READS_ROWS": "0"}),
        ("other", "", {"KVPOOL_KV_CACHE_LAYOUT": "auto"}),
    ],
)
def test_the_tested_version_another_that_is_tried_and_one_without_a_request_are_not_compared(
    launcher, other_sglang, process, argv, environment
):
    """The comparison would take half a minute of each start."""
    code = "from sgl_kvpool.sglang_plugin import fingerprint as f; f._compared = f._digests = None;"
    code += LOAD.format(argv=["x", *argv.split()]) + "print('went on')"
    done = launcher.run(
        code, **environment, **({"PYTHONPATH": str(other_sglang)} if process == "other" else {})
    )
    assert done.stdout == "went on\n", done.stderr


@pytest.mark.parametrize("breakage", [RENAMED_STEP, OTHER_FAILURE])
def test_without_a_visible_request_the_argument_stays_unknown(launcher, breakage):
    """The request may be in a YAML file."""
    code = (
        breakage + LOAD.format(argv=["x"]) + "import argparse; from sglang.srt.server_args import ServerArgs;"
        "parser = argparse.ArgumentParser(); ServerArgs.add_cli_args(parser);"
        "print('--kv-cache-layout' in parser._option_string_actions)"
    )
    assert launcher.run(code).stdout == "False\n"


@pytest.mark.parametrize("has_launcher", [True, False])
def test_a_refusal_that_is_not_utf8_ends_a_scheduler_with_its_text(scheduler, tmp_path, has_launcher):
    """Names of folders need not be UTF-8, and the locale's encoding need not be UTF-8 either."""
    code = (
        "import sys; from sgl_kvpool.refusal import Refusal; from sgl_kvpool.sglang_plugin import startup\n"
        "sys.stderr.reconfigure(errors='strict')\n"
        "with startup.ending_when_refused(): raise Refusal('folder /\\udcff/\\xe9')"
    )
    left = tmp_path / "refusal"
    told = {"_KVPOOL_CHILD_REFUSAL": str(left)} if has_launcher else {}
    done = scheduler.run(code, **told, PYTHONIOENCODING="utf-8")
    assert done.returncode == 1
    text = left.read_text(encoding="utf-8") if has_launcher else done.stderr.splitlines()[-1]
    assert text.endswith("folder /\\udcff/\xe9")


@pytest.mark.parametrize("folder", ["", "gone"])
def test_a_scheduler_leaves_its_refusal_to_the_launcher(scheduler, tmp_path, folder):
    """A refusal at plugin load goes to the file, like one at construction; no launcher reads it here.

    If it cannot be written, as on a full disk, SGLang would swallow the OSError and serve without the layout.
    """
    left = tmp_path / folder / "refusal"
    done = scheduler.run(WITHOUT_POINT, **{GROUPS: "pools", "_KVPOOL_CHILD_REFUSAL": str(left)})
    assert (done.returncode, done.stdout) == (1, "")
    assert "_resolve_kv_pool_class: not there" in (done.stderr if folder else left.read_text())
    assert ("sgl-kvpool" in forks.without_folders(done.stderr)) == bool(folder)
    assert [path.name for path in tmp_path.iterdir()] == ([] if folder else ["refusal"])


def test_every_argument_that_is_read_is_a_checked_field():
    """A renamed field is named in the refusal, instead of an AttributeError at the first read.

    Arguments are read from records, views of them and SGLang's namespaces, also by a name in a string, so
    every attribute and string with the name of an argument counts.
    """
    fields = ARGUMENTS.declared.points["sglang.srt.server_args.ServerArgs._NS_BY_FIELD"].members
    found = set()
    for floor in ("sglang_plugin", "srt"):
        for module in (ROOT / "sgl_kvpool" / floor).rglob("*.py"):
            for node in ast.walk(ast.parse(module.read_text())):
                match node:
                    case ast.Attribute(attr=name) | ast.Constant(value=str(name)):
                        found.add(name)
    # Of tensors and configurations, metrics, a hybrid's backend, a plan of drafts and a draft's worker.
    others = {"dtype", "host", "linear_attn_backend", "sidecar", "speculative_num_steps"}
    assert (found & {*ServerArgs._NS_BY_FIELD}) - {*fields} == others


#: Prints the hook groups of which all points are hooked, and those of which some are.
HOOKED = (
    "from sgl_kvpool.sglang_plugin.hook_groups import GROUPS;"
    "from sgl_kvpool.sglang_plugin.hook_points import check;"
    "d = {g.name: g.declared.points.values() for g in GROUPS};"
    "n = {g: (len(check(p, applied=True)), sum(o.hooked or bool(o.added) for o in p)) for g, p in d.items()};"
    "print([g for g, (bad, of) in n.items() if of and not bad],"
    " [g for g, (bad, of) in n.items() if 0 < bad < of])"
)


@pytest.mark.parametrize(
    ("environment", "groups"),
    [
        ({}, []),
        # Both attention groups register the same.
        (
            {GROUPS: "pools, dense MLA on a CPU, host tier"},
            ["pools", "dense MLA on a CPU", "dense MLA on CUDA", "host tier"],
        ),
        ({"KVPOOL_FIX_TOPK": "1"}, ["sparse attention"]),
        ({"KVPOOL_FIX_TOPK": "0"}, []),
        # Without a launcher's hook groups: its arguments were resolved before plugins were loaded.
        ({LAYOUT_NAME: "fp4"}, ["pools"]),
    ],
)
def test_nothing_but_arguments_is_hooked_unless_asked_for(scheduler, environment, groups):
    """Hooks and the registration of our backend, in a scheduler process."""
    code = "import sglang.srt.mem_cache.memory_pool;" + LOAD.format(argv=["x"]) + HOOKED
    done = scheduler.run(code, **environment)
    assert (done.returncode, done.stdout) == (0, f"{['arguments', *groups]} []\n"), done.stderr


def test_a_group_that_does_not_work_keeps_the_others_of_a_scheduler_from_being_applied(scheduler):
    """The last of the server's groups, whose only hook point is missing."""
    code = (
        "import sglang.srt.utils as u; del u.set_prometheus_multiproc_dir; import sys; sys.argv = ['x']\n"
        "from sglang.srt.plugins import load_plugins\n"
        "try: load_plugins()\n"
        "except SystemExit: "
    ) + HOOKED
    done = scheduler.run(code, _KVPOOL_CHILD_HOOK_GROUPS="pools, host tier, metrics")
    assert done.stdout == "['arguments'] []\n", done.stderr
    assert "hook group 'metrics' does not work on SGLang 0.5.23: sglang.srt.utils.set_prom" in done.stderr
    assert "; leave out --enable-metrics\n" in done.stderr


@pytest.mark.parametrize(
    ("version", "fits"),
    [
        *((version, True) for version in ("0.5.23", "0.5.23.post1", "0.5.23+cu130")),
        # For pip, too, rc1 is below 0.5.23.
        *((version, False) for version in ("0.5.22", "0.5.24", "0.5.24.dev3", "0.5.23rc1", "1!0.5.23")),
        *((version, False) for version in ("main", None)),
    ],
)
def test_versions(monkeypatch, version, fits):
    monkeypatch.setattr(hook_points, "installed_version", lambda: version)
    problem = hook_points.version_problem()
    assert (problem is None) == fits
    assert fits or f"SGLang {version} is not a version this release was tested with" in problem


def test_the_package_asks_for_the_versions_that_are_tested():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"sglang{hook_points.TESTED}" in project["dependencies"]
