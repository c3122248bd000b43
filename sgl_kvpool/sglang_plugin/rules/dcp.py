"""What does not work with a layout on a server with decode context parallelism (`--dcp-size`)."""

from typing import Any

from sgl_kvpool import env
from sgl_kvpool.attention.readers import KVPOOL_BACKEND
from sgl_kvpool.layout import MLAKVCacheLayout
from sgl_kvpool.refusal import Refusal
from sgl_kvpool.sglang_plugin.models import is_dsa, is_hybrid, model_name
from sgl_kvpool.sglang_plugin.options import LAYOUT
from sgl_kvpool.sglang_plugin.registry import fields
from sgl_kvpool.sglang_plugin.rules.features import DCP_FEATURES, first_in_use
from sgl_kvpool.sglang_plugin.rules.host_sharing import same_rows_ranks

fields("dcp_size")

#: Models of which SGLang gathers the rows of several ranks for a prefill.
_GATHERED = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "KimiK25ForConditionalGeneration")


def check_ranks(view: Any) -> None:
    """Refuse ranks that cannot be grouped, which SGLang asserts without a text, or does not notice."""
    for flag, count, ranks, what in (
        ("--attn-dp-size", view.attn_dp_size, view.tp_size, "tensor-parallel ranks"),
        ("--dcp-size", view.dcp_size, same_rows_ranks(view), "attention ranks"),
    ):
        if count < 1 or ranks % count:
            raise Refusal(f"{flag} {count} does not divide {ranks} {what}; give a divisor of {ranks}")


def check(layout: MLAKVCacheLayout, model_config: Any, view: Any) -> None:
    """Refuse ranks, and models and arguments with several of them; `view` holds the user's values."""
    check_ranks(view)
    if view.dcp_size == 1:
        return
    ours = f"--dcp-size {view.dcp_size} does not work with {LAYOUT.flag} {layout}"
    if view.device == "cpu":
        raise Refusal(f"{ours} on a CPU: SGLang merges results of ranks by kernels for GPUs; leave it out")
    for unfit, reason in (
        (
            is_dsa(model_config),
            "SGLang attends such lists of several ranks with TensorRT-LLM's kernel for Blackwell, which does "
            "not read these rows",
        ),
        (is_hybrid(model_config), "with layers that keep states it has not been tested"),
        (
            model_name(model_config) not in _GATHERED,
            "SGLang does not gather the rows of several ranks for its prefills",
        ),
        (
            getattr(model_config.hf_text_config, "llama_4_scaling", None),
            "where SGLang scales its queries by their position, it does not merge results of ranks",
        ),
    ):
        if unfit:
            raise Refusal(f"{ours} and {model_name(model_config)}: {reason}; leave it out")
    if (found := first_in_use(DCP_FEATURES, view)) is not None:
        feature, text = found
        raise Refusal(f"{ours} and {text}: {feature.reason}; leave out one of them")
    if env.flag(env.PREFILL_READS_ROWS):
        raise Refusal(
            f"{ours} and {env.PREFILL_READS_ROWS}=1: the rows of a prefill's new tokens are stored on "
            "several ranks; leave out one of them"
        )


def check_backends(layout: MLAKVCacheLayout, in_use: tuple[str | None, str | None], view: Any) -> None:
    """Refuse other attention backends than ours, whatever rows they read."""
    others = [backend for backend in in_use if backend != KVPOOL_BACKEND]
    if view.dcp_size > 1 and others:
        raise Refusal(
            f"--dcp-size {view.dcp_size} with {LAYOUT.flag} {layout} needs attention backend "
            f"{KVPOOL_BACKEND} in all phases, and {others[0]} has not been tested over these pools; use "
            f"--attention-backend {KVPOOL_BACKEND} alone"
        )
