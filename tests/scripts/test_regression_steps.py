"""Which steps there are on which machine, what is requested of their servers, and the command's refusals."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
from step_cases import ONLY_TORCH

from scripts.h100_regression import main, options_of, parser
from scripts.kit.environment import OPTIONAL_MODULES, ROOT, Machine
from scripts.kit.records import read_run
from scripts.servers.limits import LIMITS
from scripts.servers.request import PARTS, Request
from scripts.servers.shapes import LAYOUTS, random_shapes
from scripts.servers.steps import Options, all_steps, choose, first_light_steps

NO_GPU = Machine(modules=frozenset(OPTIONAL_MODULES), has_plugin=True)
EVERYTHING = replace(NO_GPU, gpus=("NVIDIA H100 80GB HBM3",) * 2, has_fa3=True)
CORE = ["tests-codec", "tests-mla_decode", "tests-transfer", "codec", "attention", "transfer"]


def steps(machine=EVERYTHING, **options):
    return {step.name: step for step in all_steps(machine, Options(**options))}


def request(step):
    return Request.from_json(step.files["request.json"])


@pytest.mark.parametrize("machine", [EVERYTHING, NO_GPU])
def test_files_that_steps_name_exist(machine):
    every = [*all_steps(machine, Options(thorough=True)), *first_light_steps(on_gpu=bool(machine.gpus))]
    words = [word for step in every for word in step.command]
    named = [word.partition("::") for word in words if str(word).startswith(("tests/", "scripts/"))]
    assert len(named) > 3
    for file, _, test in named:
        assert f"def {test}" in (ROOT / file).read_text()


def test_without_sglang_everything_beyond_core_is_skipped_with_a_reason():
    assert list(steps(ONLY_TORCH, core=True)) == CORE
    found = steps(ONLY_TORCH)
    missing = {name: ONLY_TORCH.missing(step.needs) for name, step in found.items()}
    assert [name for name, reason in missing.items() if reason is None] == CORE
    assert missing["serve-v3-fp4"] == "sglang is not installed"


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


def test_layouts_bring_what_they_are_compared_with(tmp_path):
    options = options_of(parser().parse_args(["--layouts", "fp4,bf16"]), EVERYTHING, tmp_path)
    assert options.layouts == ("bf16", "fp4")
    assert options_of(parser().parse_args([]), EVERYTHING, tmp_path).layouts == LAYOUTS
    names = [n for n in steps(layouts=("fp4",)) if n.startswith("serve-v3-") and "_major" not in n]
    assert names == ["serve-v3-stock", "serve-v3-bf16", "serve-v3-fp4"]
    chosen = choose(list(steps().values()), ["serve-kimi-fp4-token_major"])
    served = [f"serve-kimi-{name}" for name in ("stock", "bf16", "fp4", "fp4-token_major")]
    assert [step.name for step in chosen] == ["model-kimi", *served]
    with pytest.raises(ValueError, match=r"--only serve-v4: no step has such a name; there are tests-codec"):
        choose(list(steps().values()), ["serve-v4"])


def test_every_shape_and_layout_has_limits():
    assert set(LIMITS) == {"demo", *(shape.name for shape in random_shapes(EVERYTHING))}
    assert all(set(limits) == set(LAYOUTS) for limits in LIMITS.values())
    for name, model in LIMITS.items():
        # A layout with fewer bits may be further away; the smallest distance is below the largest.
        assert model["bf16"].near < model["fp8_block_scale"].near <= model["fp4"].near
        assert all(0 <= one.far < one.near for one in model.values())
        # Without a smallest distance: SGLang's own rows, and rows whose rounding other layers exceed.
        hidden = {"fp8", "fp8_block_scale"} if name == "kimi" else set()
        assert {layout for layout, one in model.items() if one.far == 0} == {"bf16", *hidden}


#: SGLang and packages that come with it; for `find_spec` they are not there.
HIDDEN = ("sglang", "sgl_kernel", "transformers", "flashinfer", "safetensors")
HIDES = f"import sys; sys.modules.update(dict.fromkeys({HIDDEN}))"


def test_a_core_step_without_sglang(tmp_path):
    """As on a box with torch alone: a real step of --core, from another folder."""
    (tmp_path / "sitecustomize.py").write_text(HIDES)
    argv = [ROOT / "scripts" / "h100_regression.py", "--core", "--only", "codec-quick", "--out", "results"]
    done = subprocess.run(
        [sys.executable, *argv], capture_output=True, text=True, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)}, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = read_run(tmp_path / "results" / "results.jsonl")
    assert "sglang" not in found.facts["modules"]
    assert "torch" in found.facts["versions"]
    assert [len(found.steps), found.steps["codec-quick"].status, found.is_complete] == [1, "ok", True]
    # A second run into the same folder has nothing left to do.
    again = subprocess.run([sys.executable, *argv], capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert again.returncode == 0
    assert "[1/" not in again.stdout


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (["--device", "cuda"], "torch sees no GPU"),
        (["--layouts", "fp4,int2"], "unknown KV cache layout 'int2'"),
        (["--minutes", "0"], "0 is not a finite number above 0"),
        (["--with", "x"], "needs --compare"),
        (["--compare", "/no/such.jsonl"], "--compare '/no/such.jsonl': No such file"),
        (["--compare", "/bin/sh"], "--compare '/bin/sh': 'utf-8' codec can't decode"),
    ],
)
def test_refusals(argv, why, capsys):
    with pytest.raises(SystemExit) as caught:
        main([*argv, "--list"])
    assert caught.value.code == 2
    assert why in capsys.readouterr().err
