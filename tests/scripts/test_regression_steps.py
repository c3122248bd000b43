"""Which steps there are on which machine, what is requested of their servers, and the command's refusals."""

import json
import os
import re
import subprocess
import sys

import pytest

from scripts.h100_regression import in_all, main
from scripts.kit import environment
from scripts.kit.environment import OPTIONAL_MODULES, ROOT, Machine, facts_of
from scripts.kit.records import read_run
from scripts.servers.first_light import first_light_steps
from scripts.servers.limits import LIMITS
from scripts.servers.questions import Hits, full_hit
from scripts.servers.request import PARTS, Request
from scripts.servers.serve import Asked
from scripts.servers.server_steps import measurements
from scripts.servers.shapes import ARRANGEMENTS, LAYOUTS, RANDOM_SHAPES
from scripts.servers.steps import Options, all_steps, choose

EVERYTHING = Machine(
    gpus=("NVIDIA H100 80GB HBM3",) * 2, modules=frozenset(OPTIONAL_MODULES), has_plugin=True, has_fa3=True
)
ONLY_TORCH = Machine(gpus=("NVIDIA H200",), modules=frozenset({"pytest", "numpy", "ml_dtypes"}))
NO_GPU = Machine(modules=EVERYTHING.modules, has_plugin=True)
CORE = ["tests-codec", "tests-mla_decode", "tests-transfer", "codec", "attention", "transfer"]


def steps(machine=EVERYTHING, **options):
    return {step.name: step for step in all_steps(machine, Options(**options))}


def request(step):
    return Request.from_json(step.files["request.json"])


@pytest.mark.parametrize("machine", [EVERYTHING, NO_GPU])
def test_files_that_steps_name_exist(machine):
    every = [
        *all_steps(machine, Options(thorough=True)),
        *first_light_steps(machine, on_gpu=bool(machine.gpus)),
    ]
    words = [word for step in every for word in step.command]
    named = [word.partition("::") for word in words if str(word).startswith(("tests/", "scripts/"))]
    assert len(named) > 3
    for file, _, test in named:
        assert f"def {test}" in (ROOT / file).read_text()


def test_core_needs_torch_triton_and_what_its_tests_import():
    found = steps(ONLY_TORCH, core=True)
    assert list(found) == CORE
    assert all(ONLY_TORCH.missing(step.needs) is None for step in found.values())


def test_without_sglang_everything_beyond_core_is_skipped_with_a_reason():
    found = steps(ONLY_TORCH)
    missing = {name: ONLY_TORCH.missing(step.needs) for name, step in found.items()}
    assert [name for name, reason in missing.items() if reason is None] == CORE
    assert missing["serve-v3-fp4"] == "sglang is not installed"


def test_servers_of_every_layout_and_arrangement():
    found = steps()
    assert all(EVERYTHING.missing(step.needs) is None and not step.without for step in found.values())
    for shape in RANDOM_SHAPES:
        # Sparse attention needs layer_major.
        arrangements = ARRANGEMENTS if shape != "v32" else ARRANGEMENTS[:1]
        expected = {f"serve-{shape}-stock"}
        for arrangement in arrangements:
            tail = "" if arrangement == "layer_major" else f"-{arrangement}"
            expected |= {f"serve-{shape}-{layout}{tail}" for layout in LAYOUTS}
        assert {name for name in found if name.startswith(f"serve-{shape}-")} == expected
        assert {f"memory-{shape}-{layout}" for layout in ("stock", *LAYOUTS)} <= set(found)
        assert {f"tp2-{shape}-{layout}" for layout in LAYOUTS} <= set(found)


def test_each_server_is_asked_everything_and_compared():
    found = steps()
    for name, step in found.items():
        if not name.startswith("serve-"):
            continue
        asked = request(step)
        assert asked.parts == list(PARTS)
        assert asked.evict_tokens > 0
        assert asked.load.is_sparse == (asked.model == "v32")
        assert "--enable-hierarchical-cache" in asked.arguments
        layouts = [asked.arguments[i + 1] for i, a in enumerate(asked.arguments) if a == "--kv-cache-layout"]
        assert layouts == ([] if asked.layout is None else [asked.layout])
        # Sparse attention always reads stored rows, and refuses the variable that asks for it.
        told = "1" if asked.layout is not None and asked.model != "v32" else None
        assert asked.environment.get("KVPOOL_PREFILL_READS_ROWS") == told
        # SGLang's own classes, not the demo's.
        assert asked.environment["SGLANG_EXTERNAL_MODEL_PACKAGE"] == ""
        # Everything it is compared with is served before it.
        order = list(found)
        assert all(order.index(peer) < order.index(name) for peer in (*step.peers, *step.requires))
    fp4 = request(found["serve-v3-fp4-page_major"])
    assert set(fp4.peers) == {"stock", "bf16", "layer_major"}
    assert fp4.arguments[fp4.arguments.index("--kv-cache-arrangement") + 1] == "page_major"
    assert set(request(found["serve-v3-bf16"]).peers) == {"stock"}


def test_starts_of_servers_are_scaled_and_fit_into_their_steps():
    for machine, more in ((EVERYTHING, {}), (NO_GPU, {"on_gpu": False})):
        plain, slow = (steps(machine, time_limit_scale=scale, **more) for scale in (1.0, 2.5))
        served = [name for name, step in plain.items() if "request.json" in step.files]
        assert served
        for name in served:
            wait_s = request(plain[name]).wait_s
            assert wait_s == (1200 if more == {} else 540)
            assert request(slow[name]).wait_s == 2.5 * wait_s
            # The runner scales the step's own limit.
            assert wait_s < plain[name].limit_s == slow[name].limit_s


def test_two_ranks_are_compared_with_one():
    found = steps()
    asked = request(found["tp2-v32-fp8"])
    assert asked.arguments[-2:] == ["--tp-size", "2"]
    assert list(asked.peers) == ["tp1"]
    assert found["tp2-v32-fp8"].peers == ("serve-v32-fp8",)
    one = Machine(gpus=("NVIDIA H100",), modules=EVERYTHING.modules, has_plugin=True, has_fa3=True)
    assert one.missing(found["tp2-v32-fp8"].needs) == "needs 2 GPUs, torch sees 1"


def test_tilelang_is_needed_for_fp8_rows_of_sparse_attention_only():
    without = Machine(EVERYTHING.gpus, EVERYTHING.modules - {"tilelang"}, True, True)
    missing = {name for name, step in steps(without).items() if without.missing(step.needs)}
    assert missing == {"serve-v32-fp8", "memory-v32-fp8", "tp2-v32-fp8"}


def test_tests_below_the_server_need_hypothesis():
    without = Machine(EVERYTHING.gpus, EVERYTHING.modules - {"hypothesis"}, True, True)
    missing = {name: without.missing(step.needs) for name, step in steps(without).items()}
    found = {name: reason for name, reason in missing.items() if reason}
    assert found == dict.fromkeys(("tests-cuda_backend", "tests-dsa_backend"), "hypothesis is not installed")


def test_layouts_bring_what_they_are_compared_with():
    names = [n for n in steps(layouts=("fp4",)) if n.startswith("serve-v3-") and "_major" not in n]
    assert names == ["serve-v3-stock", "serve-v3-bf16", "serve-v3-fp4"]
    chosen = choose(list(steps().values()), ["serve-kimi-fp4-token_major"])
    assert [step.name for step in chosen] == [
        *("model-kimi", "serve-kimi-stock", "serve-kimi-bf16", "serve-kimi-fp4", "serve-kimi-fp4-token_major")
    ]
    with pytest.raises(ValueError, match=r"--only serve-v4: no step has such a name; there are tests-codec"):
        choose(list(steps().values()), ["serve-v4"])


@pytest.mark.parametrize(("name", "passed"), [("serve-v3-fp4", False), ("serve-v32-fp4", True)])
def test_sparse_attention_may_answer_other_tokens_after_a_host_hit(name, passed, monkeypatch, tmp_path):
    found = Hits(30.0, 10.0, 20.0, device_share=1.0, host_share=1.0, same_tokens=0.9)
    monkeypatch.setattr("scripts.servers.serve.wait_for_hits", lambda *_: found)
    Asked(request(steps()[name]), tmp_path).hits(None)
    said = {one.metric: one.passed for one in measurements(tmp_path)}
    assert said["same tokens after a host hit as after a device hit"] is passed
    assert said["found on the host"] is True


def found_of_a_hybrid(count, chunk):
    """Tokens of a repeated prompt that a hybrid model finds: up to the last state it kept and may use.

    States are kept after each chunk and after the last full page.
    """
    kept = {*range(chunk, count + 1, chunk), count // 64 * 64}
    return max(state for state in kept if state <= count - 1)


def test_a_hybrids_repeated_prompts_can_be_found_in_full():
    asked = request(steps()["serve-kimi-fp4"])
    chunk = int(asked.arguments[asked.arguments.index("--chunked-prefill-size") + 1])
    assert asked.load.hit_tokens > chunk
    assert found_of_a_hybrid(asked.load.hit_tokens, chunk) == full_hit(asked.load.hit_tokens) == 1856
    # A multiple of a page ends on a state that a repeat may not use.
    assert (found_of_a_hybrid(1920, chunk), full_hit(1920)) == (1792, 1856)


def test_the_reduced_form_without_a_gpu():
    assert list(steps(NO_GPU, on_gpu=False, layouts=("fp4",))) == [
        *("tests-canonical", "codec-quick", "attention-quick", "transfer-quick"),
        *("serve-demo-stock", "serve-demo-bf16", "serve-demo-fp4"),
    ]


@pytest.mark.parametrize(
    ("machine", "options"),
    [(EVERYTHING, {}), (EVERYTHING, {"thorough": True, "quick": True}), (NO_GPU, {"on_gpu": False})],
)
def test_every_step_says_how_long_it_takes(machine, options):
    found = list(steps(machine, **options).values())
    # A limit is clearly longer than the expected duration.
    assert all(0 < 1.5 * step.expected_s < step.limit_s for step in found)
    if options == {}:
        assert in_all(found, machine).startswith("82 steps, about 3 h 5")


def test_the_list_shows_durations_and_no_limits(capsys):
    assert main(["--core", "--list"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert " 45 s  a dry run" in lines["attention-quick"]
    assert "300 s" not in "".join(lines.values())
    assert lines["4"] == "4 steps, about 3 min in all; --minutes ends a run earlier"


def test_every_shape_and_layout_has_limits():
    assert set(LIMITS) == {*RANDOM_SHAPES, "demo"}
    assert all(set(limits) == set(LAYOUTS) for limits in LIMITS.values())
    for name, model in LIMITS.items():
        # A layout with fewer bits may be further away; the smallest distance is below the largest.
        assert model["bf16"].near < model["fp8_block_scale"].near <= model["fp4"].near
        assert all(0 <= one.far < one.near for one in model.values())
        # Without a smallest distance: SGLang's own rows, and rows whose rounding other layers exceed.
        hidden = {"fp8", "fp8_block_scale"} if name == "kimi" else set()
        assert {layout for layout, one in model.items() if one.far == 0} == {"bf16", *hidden}


#: SGLang and packages that come with it.
HIDDEN = ("sglang", "sgl_kernel", "transformers", "flashinfer", "safetensors")
#: Hides them, wherever they are on the path.
HIDES = f"""
import sys
from importlib.machinery import PathFinder
HIDDEN = {HIDDEN}
find = PathFinder.find_spec
def hiding(name, path=None, target=None):
    return None if name.split(".")[0] in HIDDEN else find(name, path, target)
PathFinder.find_spec = staticmethod(hiding)
"""
#: Removes the finder of an editable install; runs after `HIDES`.
DROPS = "sys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in str(getattr(f, '__module__', f))]"


def test_a_core_step_without_sglang_and_without_being_installed(tmp_path):
    """As on a box with torch alone: a real step of --core, from another folder."""
    (tmp_path / "sitecustomize.py").write_text(HIDES)
    code = f"import sys, runpy; {DROPS}; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"
    argv = [ROOT / "scripts" / "h100_regression.py", "--core", "--only", "codec-quick", "--out", "results"]
    done = subprocess.run(
        [sys.executable, "-c", code, *argv], capture_output=True, text=True, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)}, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\[1/1\] codec-quick, about .* \.\.\. ", done.stdout)
    found = read_run(tmp_path / "results" / "results.jsonl")
    assert "sglang" not in found.facts["modules"]
    assert "torch" in found.facts["versions"]
    assert [len(found.steps), found.steps["codec-quick"].status, found.is_complete] == [1, "ok", True]
    # A second run into the same folder has nothing left to do.
    again = subprocess.run([sys.executable, *argv], capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert again.returncode == 0
    assert "[1/" not in again.stdout


@pytest.mark.parametrize("read", ["nothing", "all steps"])
def test_a_run_goes_on_without_a_reader_of_its_output(tmp_path, read):
    argv = [
        ROOT / "scripts" / "h100_regression.py",
        "--core",
        "--only",
        "codec-quick",
        "--out",
        tmp_path / "results",
    ]
    with subprocess.Popen([sys.executable, *argv], stdout=subprocess.PIPE) as run:
        if read == "all steps":
            text = b""
            while not text.endswith(b" ok\n"):
                text += run.stdout.read(1)
        run.stdout.close()
        assert run.wait(300) == 0
    found = read_run(tmp_path / "results" / "results.jsonl")
    assert [found.steps["codec-quick"].status, found.is_complete] == ["ok", True]


def test_gpu_tests_of_core_import_without_sglang():
    """Otherwise a file could not be collected on a machine with torch alone."""
    words = [word for step in steps(ONLY_TORCH, core=True).values() for word in step.command]
    files = [word for word in words if word.startswith("tests/gpu/")]
    assert len(files) == 3
    blocks = f"sys.modules.update(dict.fromkeys({HIDDEN}))"
    code = f"import sys, pytest; {blocks}; sys.exit(pytest.main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", code, "--collect-only", "-q", *files],
        capture_output=True, text=True, cwd=ROOT, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (["--device", "cuda"], "torch sees no GPU"),
        (["--layouts", "fp3"], "choose from bf16, fp8, fp8_block_scale, fp4"),
        (["--minutes", "0"], "not a positive number"),
        (["--with", "x"], "needs --compare"),
        (["--compare", "/no/such.jsonl"], "No such file"),
        (["--only", "nothing"], "no step has such a name"),
    ],
)
def test_refusals(argv, why, capsys):
    with pytest.raises(SystemExit) as caught:
        main([*argv, "--list"])
    assert caught.value.code == 2
    assert why in capsys.readouterr().err


def test_a_driver_that_does_not_answer_is_a_fact(monkeypatch, tmp_path):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(environment, "_DRIVER_S", 0.5)
    assert environment.driver_facts() == [{"nvidia-smi": "no answer within 0.5 s"}]


def test_facts_of_a_run():
    found = facts_of(NO_GPU, ["--quick"])
    assert len(found["commit"].removesuffix("-dirty")) == 40
    assert found["versions"]["sgl-kvpool"]
    assert found["gpu"] is None
    json.dumps(found, allow_nan=False)
