"""Decode context parallelism of models without sparse attention: their drafts, and GLM-4.7-Flash."""

from collections.abc import Iterator
from contextlib import contextmanager

from sgl_kvpool.sglang_plugin.registry import around, installs, uses

_GROUP = "dense MLA of several ranks"
_METADATA = "prepare_context_parallel_metadata_for_dcp"
#: What SGLang's runtime context says of a server without decode context parallelism.
_ONE_RANK = {"dcp_enabled": False, "attn_dcp_size": 1, "attn_dcp_rank": 0}

uses(f"sglang.srt.models.deepseek_v2.DeepseekV2ForCausalLM.{_METADATA}", _GROUP, takes=("self", "seq_lens"))
uses("sglang.srt.models.glm4_moe_lite.Glm4MoeLiteForCausalLM", _GROUP)
uses("sglang.srt.runtime_context.ParallelContext._overrides", _GROUP)


@around("sglang.srt.speculative.eagle_worker_v2.draft_tp_context", _GROUP)
@contextmanager
def _draft_tp_context(original, layout) -> Iterator[None]:
    """Build and run a draft as without decode context parallelism: each rank has all rows of its pool.

    SGLang does so for sparse drafts alone. Other MLA layers of a draft would gather queries and merge results
    of ranks that all attend the same rows, but not where the draft takes over accepted tokens.
    """
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    before = parallel._overrides
    # SGLang's `override` would check all sizes of groups, in every step of a server.
    parallel._overrides = {**before, **_ONE_RANK}
    try:
        with original(layout):
            yield
    finally:
        parallel._overrides = before


@installs(_GROUP)
def _gather_rows_of_glm() -> None:
    """Let SGLang gather the rows of all ranks for prefills of GLM-4.7-Flash, with DeepSeek's attention."""
    from sglang.srt.models.deepseek_v2 import DeepseekV2ForCausalLM
    from sglang.srt.models.glm4_moe_lite import Glm4MoeLiteForCausalLM

    if not hasattr(Glm4MoeLiteForCausalLM, _METADATA):
        setattr(Glm4MoeLiteForCausalLM, _METADATA, getattr(DeepseekV2ForCausalLM, _METADATA))
