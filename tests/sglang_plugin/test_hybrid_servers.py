"""SGLang's own resolution, for Hopper, of the servers of `tests/gpu/test_hybrid_server_gpu.py`.

Tests set Hopper's compute capability, and that the platform can snapshot states.
"""

import pytest
import random_hybrid
import test_hybrid_server_gpu as served


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {shape: random_hybrid.write(root / shape, shape) for shape in ("kimi_linear", "lightning")}


@pytest.fixture
def view(resolve, models):
    """`view(name)`: a resolving view of the server of that name."""
    from sglang.srt.arg_groups.overrides import resolving_view

    def run(name):
        [_, model, *argv] = served.command(name, models[served.SERVERS[name][0]])
        return resolving_view(resolve(model, *argv, device="cuda"))

    return run


@pytest.mark.parametrize("name", served.SERVERS)
def test_every_server_is_accepted(name, view):
    found = view(name)
    backend = "triton" if "stock" in name else "kvpool_mla"
    assert found.attention_backend == backend
    assert {found.prefill_attention_backend, found.decode_attention_backend} <= {None, backend}
    assert found.chunked_prefill_size == served.CHUNK
    assert found.uses_mamba_radix_cache
    assert not found.disable_radix_cache
    kept = "no_buffer" if "no_buffer" in name else "extra_buffer"
    assert found.mamba_radix_cache_strategy == kept
    assert found.disable_overlap_schedule is (kept == "no_buffer")


@pytest.mark.parametrize("name", [name for name in served.SERVERS if "host" in name])
def test_states_are_backed_up_with_rows(name, view):
    found = view(name)
    assert found.enable_hierarchical_cache
    # Host pools of states, SGLang's and ours, take only these.
    assert found.hicache_mem_layout in ("page_first", "page_first_direct")
    assert found.hicache_write_policy == "write_through"
    assert (found.page_size, found.mamba_track_interval % found.page_size) == (64, 0)


@pytest.mark.parametrize("name", [name for name in served.SERVERS if "mtp" in name])
def test_drafts_are_in_the_checkpoint(name, view):
    found = view(name)
    assert found.speculative_algorithm == "EAGLE"
    assert found.speculative_draft_model_path == found.model_path
    assert found.mamba_track_interval >= found.speculative_num_draft_tokens
