"""`--kv-cache-arrangement`: the ways to request it, and what is refused.

A2 is an item of the vLLM checklist of tests/connectors.
"""

import pytest

from sgl_kvpool.memory.arrangement import KVArrangement
from sgl_kvpool.sglang_plugin.options import config_of

ARRANGEMENTS = ["layer_major", "token_major", "page_major"]


@pytest.mark.parametrize("arrangement", [None, "auto"])
@pytest.mark.parametrize("backend", ["kvpool_mla", "torch_native", "triton", "fa4", "intel_amx"])
def test_a2_auto_is_layer_major(arranged, arrangement, backend):
    args = arranged(arrangement, "--attention-backend", backend)
    assert config_of(args).arrangement is KVArrangement.LAYER_MAJOR


@pytest.mark.parametrize("layout", [(), ("--kv-cache-layout", "auto")])
@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_an_arrangement_needs_a_layout(resolve, checkpoints, arrangement, layout):
    text = f"--kv-cache-arrangement {arrangement}.*add --kv-cache-layout bf16, which keeps SGLang's rows"
    with pytest.raises(ValueError, match=text):
        resolve(checkpoints["mla"], *layout, "--kv-cache-arrangement", arrangement)
