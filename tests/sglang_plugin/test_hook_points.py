"""The hook points in the installed SGLang, and what happens on another one."""

import subprocess
import sys
from pathlib import Path

import forks
import pytest

ROOT = Path(__file__).resolve().parents[2]

#: What SGLang does with plugins first, in a process of its own.
LOAD = "import sys; sys.argv = {argv!r}; from sglang.srt.plugins import load_plugins; load_plugins(); "


@pytest.fixture(scope="module")
def scheduler(tmp_path_factory, launcher):
    """As `launcher`, after the imports of a scheduler's process."""
    modules = ("sglang.srt.managers.scheduler", "sglang.srt.plugins")
    folder = tmp_path_factory.mktemp("scheduler")
    with forks.after_importing(*modules, output=folder, environment=launcher.environment) as process:
        yield process


def runner(process):
    def run(code, *, pythonpath=None, **environment):
        if pythonpath:
            environment["PYTHONPATH"] = str(pythonpath)
        return process.run(code, **environment)

    return run


@pytest.fixture
def run(launcher):
    """`run(code)`: in a process of its own, as SGLang's first."""
    return runner(launcher)


@pytest.fixture
def run_in_scheduler(scheduler):
    """`run_in_scheduler(code)`: in a process of its own, as SGLang's schedulers."""
    return runner(scheduler)


@pytest.mark.usefixtures("launcher", "scheduler")  # which import meanwhile
def test_all_hook_points_hold_in_this_sglang():
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "check_hook_points.py"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SGLang 0.5.23" in done.stdout
    assert "all hook points hold" in done.stdout


def test_every_hooked_point_has_its_hook():
    """Each target that the lists call hooked is in one mapping of hooks, and no other target is."""
    from sgl_kvpool.sglang_plugin import point_lists
    from sgl_kvpool.sglang_plugin.hooks import (
        attention,
        budget,
        disaggregation,
        dsa,
        host_tier,
        launching,
        peer_mismatch,
        pools,
        server_args,
        sharing,
        state_tier,
        stores,
    )

    hooked = {
        name: {point.target for point in getattr(point_lists, name) if point.hooked}
        for name in ("SERVER_ARGS", "LAUNCHER", "SCHEDULER")
    }
    assert hooked["SERVER_ARGS"] == set(server_args.HOOKS)
    assert hooked["LAUNCHER"] == set(launching.HOOKS)
    scheduler = [
        *(
            attention,
            budget,
            disaggregation,
            dsa,
            host_tier,
            peer_mismatch,
            pools,
            sharing,
            state_tier,
            stores,
        )
    ]
    targets = [target for module in scheduler for target in module.HOOKS]
    assert len(targets) == len(set(targets))
    assert hooked["SCHEDULER"] == {*targets, "sglang.srt.managers.scheduler.Scheduler.__init__"}
    assert tuple(server_args.STEPS) == point_lists.STEPS


def test_check_names_what_differs():
    from sgl_kvpool.sglang_plugin.hook_points import HookPoint, check

    problems = check(
        [
            HookPoint("sglang.srt.server_args.ServerArgs.gone"),
            HookPoint("sglang.srt.not_there.thing"),
            HookPoint("sglang.srt.arg_groups.overrides.declare_resolution", ("server_args", "gone")),
            HookPoint("sglang.srt.arg_groups.overrides.declare_resolution", ("source", "server_args")),
            HookPoint("sglang.srt.arg_groups.overrides.declare_resolution", ("server_args", "source")),
        ]
    )
    assert len(problems) == 4
    assert "ServerArgs.gone: not there" in problems[0]
    assert "sglang.srt.not_there.thing: not there" in problems[1]
    assert "takes no gone" in problems[2]
    assert "takes no server_args" in problems[3]  # there, but before `source`


def test_a_hook_that_was_not_applied_is_noticed():
    from sgl_kvpool.sglang_plugin.hook_points import HookPoint, check

    point = HookPoint("sglang.srt.server_args.ServerArgs.check_server_args")
    assert check([point]) == []
    assert check([point], applied=True) == [f"{point.target}: the hook was not applied"]


def test_another_version_with_nothing_asked_for_warns_once_and_hooks_nothing(run, other_sglang):
    code = LOAD.format(argv=["x"]) + (
        "from sglang.srt.server_args import ServerArgs as S;"
        "from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES as C;"
        "from sglang.srt.arg_groups.resolution_hooks import _HOOKS as H;"
        "marks = [hasattr(f, '_sgl_kvpool_hook') for f in (S.add_cli_args, S.from_cli_args)];"
        "print('hooked', marks, 'kvpool_mla' in C, [f for v in H.values() for f in v])"
    )
    done = run(code, pythonpath=other_sglang)
    assert done.returncode == 0, done.stderr
    assert "hooked [False, False] False []" in done.stdout
    assert done.stderr.count("SGLang 0.6.1 is not a version") == 1


@pytest.mark.parametrize(
    ("argv", "environment"),
    [
        (["x", "--kv-cache-layout", "fp4"], {}),
        (["x", "--kv-cache-layout=fp4"], {}),
        (["x"], {"KVPOOL_KV_CACHE_LAYOUT": "fp4"}),
        (["x", "--kv-cache-arrangement", "token_major"], {}),
        (["x"], {"KVPOOL_KV_CACHE_ARRANGEMENT": "token_major"}),
    ],
)
def test_another_version_that_was_asked_for_something_refuses(run, other_sglang, argv, environment):
    done = run(LOAD.format(argv=argv) + "print('went on')", pythonpath=other_sglang, **environment)
    asked = "arrangement" if "token_major" in [*argv, *environment.values()] else "layout"
    assert done.returncode == 1
    assert f"a KV cache {asked} was asked for, but SGLang 0.6.1" in done.stderr
    assert "went on" not in done.stdout
    assert "SGLang 0.6.1" in done.stderr
    assert "sglang>=0.5.23,<0.5.24" in done.stderr
    assert "KVPOOL_ALLOW_UNTESTED=1" in done.stderr


def test_untested_versions_can_be_tried(run, other_sglang):
    code = LOAD.format(argv=["x", "--kv-cache-layout", "fp4"]) + "print('went on')"
    done = run(code, pythonpath=other_sglang, KVPOOL_ALLOW_UNTESTED="1")
    assert done.returncode == 0, done.stderr
    assert "went on" in done.stdout


def test_a_scheduler_stops_if_a_hook_point_is_gone(run_in_scheduler):
    """As a child process of a server that was asked for a layout; SGLang swallows other exceptions."""
    code = (
        "import sglang.srt.mem_cache.memory_pool, sglang.srt.mem_cache.kv_cache_configurator as k;"
        "del k.KVCacheConfigurator._resolve_kv_pool_class;" + LOAD.format(argv=["x"]) + "print('went on')"
    )
    done = run_in_scheduler(code, _KVPOOL_CHILD_LAYOUT="fp4")
    assert done.returncode == 1, done.stderr
    assert "went on" not in done.stdout
    assert "KVCacheConfigurator._resolve_kv_pool_class: not there" in done.stderr


def test_a_scheduler_leaves_its_refusal_to_the_launcher(run_in_scheduler, tmp_path):
    """Of the plugin as of what its construction raises; here without a launcher that reads the file."""
    left = tmp_path / "refusal"
    told = {"_KVPOOL_CHILD_LAYOUT": "fp4", "_KVPOOL_CHILD_REFUSAL": str(left)}
    code = (
        "import sglang.srt.mem_cache.kv_cache_configurator as k;"
        "del k.KVCacheConfigurator._resolve_kv_pool_class;" + LOAD.format(argv=["x"]) + "print('went on')"
    )
    done = run_in_scheduler(code, **told)
    assert (done.returncode, done.stdout) == (1, "")
    assert "_resolve_kv_pool_class: not there" in left.read_text()
    assert "sgl-kvpool" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["refusal"]


def test_a_refusal_that_cannot_be_written_ends_the_scheduler_too(run_in_scheduler, tmp_path):
    """As on a full disk: SGLang would swallow an OSError of the plugin, and serve without the layout."""
    told = {"_KVPOOL_CHILD_LAYOUT": "fp4", "_KVPOOL_CHILD_REFUSAL": str(tmp_path / "gone" / "refusal")}
    code = (
        "import sglang.srt.mem_cache.kv_cache_configurator as k;"
        "del k.KVCacheConfigurator._resolve_kv_pool_class;" + LOAD.format(argv=["x"]) + "print('went on')"
    )
    done = run_in_scheduler(code, **told)
    assert (done.returncode, done.stdout) == (1, "")
    assert "_resolve_kv_pool_class: not there" in done.stderr


def test_of_many_problems_the_first_are_in_the_line():
    from sgl_kvpool.refusal import Refusal
    from sgl_kvpool.sglang_plugin.hook_points import stop_if

    with pytest.raises(Refusal, match="hook points: a; b; c; and 2 more, which `sgl-kvpool doctor` lists$"):
        stop_if([*"abcde"])
    with pytest.raises(Refusal, match="hook points: a; b; c$"):
        stop_if([*"abc"])


def test_a_step_or_field_that_is_gone_is_named():
    from sgl_kvpool.sglang_plugin.hook_points import HookPoint, check

    steps = "sglang.srt.arg_groups.resolution_hooks._OVERRIDABLE_HOOKS"
    assert check([HookPoint(steps, hooked=False, members=("handle_hicache", "gone", "left"))]) == [
        f"{steps}: has no gone, left"
    ]


@pytest.mark.parametrize(
    ("breakage", "text"),
    [
        # A resolution step that SGLang renamed.
        (
            "import sglang.srt.arg_groups.resolution_hooks as r;"
            "r._OVERRIDABLE_HOOKS = r._OVERRIDABLE_HOOKS - {'handle_deprecated_dp_attention'};",
            "has no handle_deprecated_dp_attention",
        ),
        # Anything else that goes wrong in the plugin.
        (
            "import sglang.srt.arg_groups.choices as c; c.add_attention_backend_choices = None;",
            "the plugin failed: TypeError",
        ),
    ],
)
def test_a_plugin_that_fails_stops_a_process_that_was_asked_for_a_layout(run, breakage, text):
    code = breakage + LOAD.format(argv=["x", "--kv-cache-layout", "fp4"]) + "print('went on')"
    done = run(code)
    assert done.returncode == 1, done.stderr
    assert "went on" not in done.stdout
    assert text in done.stderr
    # And leaves the argument unknown where it was not to be seen, as in YAML.
    code = (
        breakage + LOAD.format(argv=["x"]) + "import argparse; from sglang.srt.server_args import ServerArgs;"
        "parser = argparse.ArgumentParser(); ServerArgs.add_cli_args(parser);"
        "print('--kv-cache-layout' in parser._option_string_actions)"
    )
    assert run(code).stdout == "False\n"


def test_a_flag_of_the_environment_that_is_neither_yes_nor_no(run, other_sglang):
    code = LOAD.format(argv=["x", "--kv-cache-layout", "fp4"])
    done = run(code, pythonpath=other_sglang, KVPOOL_ALLOW_UNTESTED="maybe")
    assert done.returncode == 1
    assert "KVPOOL_ALLOW_UNTESTED='maybe' is neither" in done.stderr


def test_auto_is_not_asking_for_a_layout(run, other_sglang):
    for argv in (["x", "--kv-cache-layout", "auto"], ["x", "--kv-cache-arrangement=auto"]):
        done = run(LOAD.format(argv=argv) + "print('went on')", pythonpath=other_sglang)
        assert "went on" in done.stdout, done.stderr


def test_nothing_but_arguments_is_hooked_unless_asked_for(run_in_scheduler):
    """In a scheduler process: our hook points there are unmarked, and our backend is not registered."""
    code = (
        "import sglang.srt.mem_cache.memory_pool;"
        + LOAD.format(argv=["x"])
        + "from sgl_kvpool.sglang_plugin.hook_points import check;"
        "from sgl_kvpool.sglang_plugin.point_lists import SERVER_ARGS, SCHEDULER, LAUNCHER;"
        "from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS as A;"
        "print(len(check(SERVER_ARGS, applied=True)), len(check(SCHEDULER, applied=True)),"
        " len(check(LAUNCHER, applied=True)), 'kvpool_mla' in A)"
    )
    done = run_in_scheduler(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "0 40 3 False\n"
    done = run_in_scheduler(code, _KVPOOL_CHILD_LAYOUT="fp4")
    assert done.stdout == "0 0 2 True\n", done.stderr
    # The five on sparse attention alone.
    done = run_in_scheduler(code, KVPOOL_FIX_TOPK="1")
    assert done.stdout == "0 35 3 False\n", done.stderr
    done = run_in_scheduler(code, KVPOOL_FIX_TOPK="0")
    assert done.stdout == "0 40 3 False\n", done.stderr


@pytest.mark.parametrize(
    ("breakage", "value", "text"),
    [
        ("", "maybe", "KVPOOL_FIX_TOPK='maybe' is neither"),
        (
            "import sglang.srt.layers.attention.dsa_backend as d;"
            "del d.DeepseekSparseAttnBackend.get_topk_transform_method;",
            "1",
            "get_topk_transform_method: not there",
        ),
    ],
)
def test_a_fix_that_cannot_be_had_stops_a_scheduler(run_in_scheduler, breakage, value, text):
    code = breakage + LOAD.format(argv=["x"]) + "print('went on')"
    done = run_in_scheduler(code, KVPOOL_FIX_TOPK=value)
    assert done.returncode == 1, done.stderr
    assert "went on" not in done.stdout
    assert text in done.stderr


def test_the_fix_is_refused_on_another_sglang(run, other_sglang):
    done = run(LOAD.format(argv=["x"]) + "print('went on')", pythonpath=other_sglang, KVPOOL_FIX_TOPK="1")
    assert done.returncode == 1
    assert "KVPOOL_FIX_TOPK=1 was asked for, but SGLang 0.6.1 is not" in done.stderr


def test_plugins_loaded_after_ours_keep_their_hooks(run, tmp_path):
    """Hooks of several plugins on one target, whichever comes first."""
    (tmp_path / "zz_other.py").write_text(
        "from sglang.srt.plugins.hook_registry import HookRegistry, HookType\n"
        "def register():\n"
        "    HookRegistry.register('sglang.srt.server_args.ServerArgs.add_cli_args', hook,"
        " HookType.AROUND)\n"
        "def hook(original, parser):\n"
        "    original(parser)\n"
        "    parser.add_argument('--zz-other')\n"
    )
    info = tmp_path / "zz_other-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: zz-other\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nzz_other = zz_other:register\n")
    code = LOAD.format(argv=["x"]) + (
        "import argparse; from sglang.srt.server_args import ServerArgs;"
        "parser = argparse.ArgumentParser(); ServerArgs.add_cli_args(parser);"
        "flags = parser._option_string_actions;"
        "print('--zz-other' in flags, '--kv-cache-layout' in flags)"
    )
    for order in ("sgl_kvpool,zz_other", "zz_other,sgl_kvpool"):
        done = run(code, pythonpath=tmp_path, SGLANG_PLUGINS=order)
        assert done.stdout == "True True\n", done.stderr


@pytest.mark.parametrize(
    ("version", "fits"),
    [
        ("0.5.23", True),
        ("0.5.23.post1", True),
        ("0.5.23+cu130", True),
        ("0.5.22", False),
        ("0.5.24", False),
        ("0.5.24.dev3", False),
        ("0.5.23rc1", False),  # pip would not take it for >=0.5.23 either
        ("1!0.5.23", False),
        ("main", False),
        (None, False),
    ],
)
def test_versions(monkeypatch, version, fits):
    from sgl_kvpool.sglang_plugin import hook_points

    monkeypatch.setattr(hook_points, "installed_version", lambda: version)
    problem = hook_points.version_problem()
    assert (problem is None) == fits
    assert fits or f"SGLang {version} is not a version this release was tested with" in problem


def test_the_package_asks_for_the_versions_that_are_tested():
    import tomllib

    from sgl_kvpool.sglang_plugin.hook_points import TESTED

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"sglang{TESTED}" in project["dependencies"]
