"""A refused start of a server prints one last line, before models and kernels are imported."""

import pytest
from forks import without_folders

from sgl_kvpool.demo.model import model_path
from sgl_kvpool.sglang_plugin.rules import arguments as argument_rules

# A process imports SGLang and is forked for each test; test_remedies.py has the refusals without processes.
pytestmark = pytest.mark.slow

LAYOUT = ("--kv-cache-layout", "fp4")
TIER = "--enable-hierarchical-cache"
#: The two commands that start a server.
COMMANDS = {
    "launch_server": "import runpy; runpy.run_module('sglang.launch_server', None, '__main__', True)",
    "serve": "from sglang.cli.main import main; main()",
}
#: Modules of models and their kernels.
HEAVY = ("sglang.srt.configs.model_config", "sglang.srt.layers.quantization", "sglang.srt.layers.moe")
REPORT = f"import atexit, sys; atexit.register(lambda: print([m for m in {HEAVY} if m in sys.modules])); "


@pytest.fixture
def start(launcher):
    """`start(*argv)`: the finished process of SGLang's command with arguments that it refuses."""

    def run(*argv, command="serve", **environment):
        words = {"launch_server": ["launch_server"], "serve": ["sglang", "serve"]}[command]
        words += ["--model-path", str(model_path()), "--device", "cpu", *argv]
        code = f"import sys; sys.argv = {words!r}; {REPORT} {COMMANDS[command]}"
        return launcher.run(code, SGLANG_EXTERNAL_MODEL_PACKAGE="sgl_kvpool.demo.models", **environment)

    return run


def refused_by_arguments(done):
    """The last line of a command that ended before it imported models and kernels."""
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert "usage:" not in done.stderr
    *before, last = done.stderr.splitlines()
    assert last.startswith("sgl-kvpool: ")
    others = without_folders("\n".join(before))  # warnings name files
    assert "sgl-kvpool" not in others
    assert "sgl_kvpool" not in others
    assert done.stdout.splitlines()[-1] == "[]"
    return last.removeprefix("sgl-kvpool: ")


@pytest.mark.parametrize(
    ("argv", "environment", "text"),
    [
        ((LAYOUT[0], "fp5"), {}, "--kv-cache-layout 'fp5' is not a KV cache layout; choose one of: auto"),
        ((), {"KVPOOL_KV_CACHE_LAYOUT": "int2"}, "KVPOOL_KV_CACHE_LAYOUT='int2' is not a KV cache layout;"),
        ((*LAYOUT, "--enable-hisparse"), {}, "--enable-hisparse does not work with --kv-cache-layout fp4"),
    ],
)
def test_refusals_by_the_arguments_alone(start, argv, environment, text):
    assert refused_by_arguments(start(*argv, **environment)).startswith(text)


def test_refusals_of_launch_server_with_a_configuration_file(start, tmp_path):
    config = tmp_path / "server.yaml"
    config.write_text("kv-cache-layout: fp4\nkv-host-layout: fp4\n")
    last = refused_by_arguments(start("--config", str(config), command="launch_server"))
    assert last.startswith("--kv-host-layout fp4 (or KVPOOL_KV_HOST_LAYOUT) does nothing without")


def test_a_refusal_that_depends_on_the_model(start):
    """This refusal comes later, after the model's configuration is read, and is as short."""
    done = start("--kv-cache-layout", "fp4", "--kv-host-layout", "fp8_block_scale", TIER)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("sgl-kvpool: --kv-host-layout fp8_block_scale does not work: ")


def test_errors_of_others_keep_their_traceback(start):
    """An error of SGLang, with a layout, raised after a hook of ours was called."""
    done = start(*LAYOUT, "--served-model-name", "team:name")
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("AssertionError: served_model_name cannot contain a colon")


#: A program with an Engine that catches the exception.
PROGRAM = """
import sglang, sys
from sglang import Engine
try:
    Engine(model_path={model!r}, device='cpu', {arguments})
except ValueError as error:
    print('caught', error)
"""


@pytest.mark.parametrize(
    ("arguments", "environment", "text"),
    [
        ("kv_cache_layout='fp5'", {}, "kv_cache_layout='fp5' is not a KV cache layout; choose one of: auto"),
        ("kv_cache_layout='fp4', page_size=-64", {}, "--page-size -64 is not a valid number of tokens"),
        ("", {"KVPOOL_FIX_TOPK": "perhaps"}, "KVPOOL_FIX_TOPK='perhaps' is neither yes"),
    ],
)
def test_an_engine_raises_in_its_program(launcher, arguments, environment, text):
    code = PROGRAM.format(model=str(model_path()), arguments=arguments)
    done = launcher.run(code, **environment)
    assert done.returncode == 0, done.stderr
    assert f"caught {text}" in done.stdout


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((number.field, "-1") for number in argument_rules.NUMBERS),
        *(("page_size", "0"), ("mem_fraction_static", "1.5"), ("mem_fraction_static", "nan")),
        *(("mamba_full_memory_ratio", "inf"), ("tp_size", "0"), ("attn_dp_size", "0"), ("attn_cp_size", "0")),
    ],
)
def test_invalid_numbers_of_the_pool_are_refused(resolve, checkpoints, field, value):
    """The message names the flag; SGLang's parser accepts it, so the spelling is SGLang's."""
    flag = "--" + field.replace("_", "-")
    text = f"^{flag} {float(value):g}(.0)? is not a valid .*; give .*, or leave it out$"
    with pytest.raises(ValueError, match=text):
        resolve(checkpoints["mla"], *LAYOUT, f"{flag}={value}")


def test_without_a_layout_numbers_are_passed_to_sglang(resolve, checkpoints):
    found = resolve(checkpoints["mla"], "--max-total-tokens", "-5", "--max-running-requests", "0")
    assert (found.max_total_tokens, found.max_running_requests) == (-5, 0)


@pytest.mark.parametrize("named", [("--page-size", "64"), ("--enable-hierarchical-cache",)])
def test_a_pool_without_a_page(resolve, checkpoints, named):
    """With a page size that was given, or with that of a host tier."""
    text = "^--max-total-tokens 63 is less than a page, which has 64 tokens; give at least as many"
    with pytest.raises(ValueError, match=text):
        resolve(checkpoints["mla"], *LAYOUT, "--max-total-tokens", "63", *named)
    assert resolve(checkpoints["mla"], *LAYOUT, "--max-total-tokens", "64", *named).max_total_tokens == 64
