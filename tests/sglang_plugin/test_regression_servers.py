"""SGLang's own resolution, for Hopper, of every server that scripts/h100_regression.py starts on a GPU.

With `--thorough` the script also runs the server tests of tests/gpu.
"""

import itertools

import pytest
import random_deepseek
import random_hybrid
import test_server_gpu
from sglang.srt.arg_groups.overrides import resolving_view

from scripts.kit.environment import OPTIONAL_MODULES, Machine
from scripts.servers.request import Request
from scripts.servers.shapes import random_shapes, write_checkpoint
from scripts.servers.steps import Options, all_steps

MACHINE = Machine(("NVIDIA H100",) * 2, frozenset(OPTIONAL_MODULES), has_plugin=True, has_fa3=True)


#: Name of a step -> the `Request` of its server.
STEPS = {
    step.name: Request.from_json(step.files["request.json"])
    for step in all_steps(MACHINE, Options(models="MODELS"))
    if "request.json" in step.files
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The checkpoints that the steps `model-*` write."""
    root = tmp_path_factory.mktemp("models")
    for shape in random_shapes(MACHINE):
        write_checkpoint(*shape.writer, root / shape.name)
    return root


@pytest.fixture
def view(resolve, monkeypatch):
    """`view(arguments, environment)`: a resolving view of a server."""

    def run(arguments, environment):
        flag, model, *argv = arguments
        assert flag == "--model-path"
        with monkeypatch.context() as patched:
            for key, value in environment.items():
                patched.setenv(key, value)
            return resolving_view(resolve(model, *argv, device="cuda"))

    return run


def backends(layout, is_sparse):
    """Attention backends that a server may have; SGLang selects fa3 on Hopper, and triton without CUDA."""
    return ("dsa",) if is_sparse else ("fa3", "triton") if layout is None else ("kvpool_mla",)


def check_eviction(request, found):
    """Prompts for hits fit in the pool, and are pushed out of it but not out of the host tier."""
    length = request.load.hit_tokens
    assert 3 * length < found.max_total_tokens < request.evict_tokens
    assert found.hicache_ratio * found.max_total_tokens > request.evict_tokens + 3 * length


@pytest.mark.parametrize("name", STEPS)
def test_every_server_of_a_random_model_is_accepted(name, view, models):
    request = STEPS[name]
    arguments = [word.replace("MODELS", str(models)) for word in request.arguments]
    found = view(arguments, request.environment)
    assert found.attention_backend in backends(request.layout, request.model == "v32")
    assert found.page_size == 64
    assert found.tp_size == (2 if name.startswith("tp2") else 1)
    assert found.enable_hierarchical_cache is not name.startswith("memory")
    assert (found.max_total_tokens is None) is name.startswith("memory")
    # The longest prompt and the tokens generated after it fit.
    load = request.load
    longest = max([*map(len, load.prompts), load.hit_tokens, load.request_tokens + load.new_tokens])
    assert longest + 32 < found.context_length
    if found.max_total_tokens is not None:
        check_eviction(request, found)


@pytest.fixture(scope="module")
def checkpoints_of_tests(tmp_path_factory):
    """The checkpoints that the server tests of tests/gpu write."""
    root = tmp_path_factory.mktemp("models")
    shapes = dict.fromkeys(shape for shape, _ in test_server_gpu.SERVERS)
    writers = {
        shape: random_hybrid if shape in random_hybrid.CONFIGS else random_deepseek for shape in shapes
    }
    return {shape: writer.write(root / shape, shape) for shape, writer in writers.items()}


@pytest.mark.parametrize(("shape", "name"), test_server_gpu.SERVERS)
def test_every_server_of_the_gpu_tests_is_accepted(shape, name, view, checkpoints_of_tests, monkeypatch):
    class Started(Exception):
        """Raised instead of starting a server."""

    def start(arguments, log, environment, **_):
        raise Started(arguments, environment)

    monkeypatch.setattr(test_server_gpu, "Server", start)
    with pytest.raises(Started) as started:
        test_server_gpu.ask(shape, name, checkpoints_of_tests[shape], "log")
    arguments, environment = started.value.args
    found = view(arguments, environment)
    layout = dict(itertools.pairwise(arguments)).get("--kv-cache-layout")
    assert found.attention_backend in backends(layout, shape in random_deepseek.SPARSE)
    assert found.enable_hierarchical_cache is ("--enable-hierarchical-cache" in arguments)
    assert max(map(len, test_server_gpu.prompts_of(shape))) + 32 < found.context_length
    if "mtp" in name:
        assert found.speculative_algorithm == "EAGLE"
        assert found.speculative_draft_model_path == found.model_path
    if shape in random_hybrid.CONFIGS:
        assert found.uses_mamba_radix_cache
        kept = "no_buffer" if "no_buffer" in name else "extra_buffer"
        assert found.mamba_radix_cache_strategy == kept
        assert found.disable_overlap_schedule is (kept == "no_buffer")
        assert found.mamba_track_interval >= (found.speculative_num_draft_tokens or 0)
        # Host pools of states, SGLang's and ours, take only these.
        if found.enable_hierarchical_cache:
            assert found.hicache_mem_layout in ("page_first", "page_first_direct")
            assert (found.page_size, found.mamba_track_interval % found.page_size) == (64, 0)
