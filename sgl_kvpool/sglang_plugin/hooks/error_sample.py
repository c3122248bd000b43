"""The hook that compares sampled prefills with their stored rows (`--kv-error-sample`)."""

from sgl_kvpool.sglang_plugin.options import ERROR_SAMPLE, config_of
from sgl_kvpool.sglang_plugin.registry import around


@around("sglang.srt.model_executor.model_runner.ModelRunner.forward", "error samples")
def _forward(original, self, forward_batch, *args, **kwargs):
    """Compare tokens of every n-th prefill of the target with their stored rows."""
    from sgl_kvpool.srt.attention.decode_verify import has_fixed_query_length
    from sgl_kvpool.srt.pool.error_sample import ErrorSample

    if self.is_draft_worker or has_fixed_query_length(forward_batch.forward_mode):
        return original(self, forward_batch, *args, **kwargs)
    pool = self.token_to_kv_pool.row_pool
    if pool.error_sample is None:
        pool.error_sample = ErrorSample(pool, int(config_of(self.server_args).requests(ERROR_SAMPLE)))
    is_sampled = pool.error_sample.begin()
    output = original(self, forward_batch, *args, **kwargs)
    if is_sampled:
        pool.error_sample.end("replayed" if output.can_run_graph else "eager")
    return output
