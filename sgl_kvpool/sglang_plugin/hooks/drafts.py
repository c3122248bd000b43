"""The attention backends of draft models."""

from sgl_kvpool.sglang_plugin.registry import around, uses
from sgl_kvpool.srt.facts.readers import KVPOOL_BACKEND
from sgl_kvpool.srt.pool.drafts import require_mla

_FACTORY = "sglang.srt.speculative.draft_utils.DraftBackendFactory"


uses(f"{_FACTORY}.create_decode_backend", "speculative decoding", takes=("self",))
uses(f"{_FACTORY}.create_draft_extend_backend", "speculative decoding", takes=("self",))


@around(f"{_FACTORY}._create_backend", "speculative decoding")
def _create_draft(original, self, backend_name, backend_map, error_template, stamps_children=False):
    """Add our backends to the map in which SGLang looks up the name.

    SGLang calls this function with two maps, for draft decoding and for draft extend. It passes
    `stamps_children` with the former, whose backends contain one backend per step.
    """
    runner = self.draft_model_runner

    def create():
        require_mla(runner)
        if stamps_children:
            from sgl_kvpool.srt.attention.draft import KVPoolMultiStepDraftBackend

            return KVPOOL_BACKEND, KVPoolMultiStepDraftBackend(runner, self.topk, self.speculative_num_steps)
        from sgl_kvpool.srt.attention.cuda import KVPoolMLACudaBackend

        return KVPOOL_BACKEND, KVPoolMLACudaBackend(runner, skip_prefill=False)

    backend_map = {**backend_map, KVPOOL_BACKEND: create}
    return original(self, backend_name, backend_map, error_template, stamps_children=stamps_children)
