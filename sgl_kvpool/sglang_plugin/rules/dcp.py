"""What does not work with a layout on a server with decode context parallelism (`--dcp-size`)."""

from sgl_kvpool import env
from sgl_kvpool.refusal import Refusal, Way, leave_out, leave_out_one
from sgl_kvpool.sglang_plugin.options import LAYOUT
from sgl_kvpool.sglang_plugin.registry import fields
from sgl_kvpool.sglang_plugin.rules.attention import ALONE
from sgl_kvpool.sglang_plugin.rules.features import DCP_FEATURES, first_in_use
from sgl_kvpool.sglang_plugin.server import Server
from sgl_kvpool.srt.facts.readers import KVPOOL_BACKEND

fields("dcp_size")

#: Models of which SGLang gathers the rows of several ranks for a prefill.
_GATHERED = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "KimiK25ForConditionalGeneration")


def check_ranks(server: Server) -> None:
    """Refuse ranks that cannot be grouped, which SGLang asserts without a text, or does not notice."""
    view = server.view
    for flag, count, ranks, what in (
        ("--attn-dp-size", view.attn_dp_size, view.tp_size, "tensor-parallel ranks"),
        ("--dcp-size", view.dcp_size, server.same_rows_ranks, "attention ranks"),
    ):
        if count < 1 or ranks % count:
            way = Way(f"give a divisor of {ranks}", add=(f"{flag}=1",))
            raise Refusal(f"{flag} {count} does not divide {ranks} {what}", way)


def check(server: Server) -> None:
    """Refuse ranks, and models and arguments with several of them."""
    check_ranks(server)
    view, name = server.view, server.model_name
    if view.dcp_size == 1:
        return
    out = leave_out("--dcp-size")
    ours = f"--dcp-size {view.dcp_size} does not work with {LAYOUT.flag} {server.layout}"
    if view.device == "cpu":
        raise Refusal(f"{ours} on a CPU: SGLang merges results of ranks by kernels for GPUs", out)
    for unfit, reason in (
        (
            server.is_dsa,
            "SGLang attends such lists of several ranks with TensorRT-LLM's kernel for Blackwell, which does "
            "not read these rows",
        ),
        (server.is_hybrid, "with layers that keep states it has not been tested"),
        (
            name not in _GATHERED,
            "SGLang does not gather the rows of several ranks for its prefills",
        ),
        (
            getattr(server.model_config.hf_text_config, "llama_4_scaling", None),
            "where SGLang scales its queries by their position, it does not merge results of ranks",
        ),
    ):
        if unfit:
            raise Refusal(f"{ours} and {name}: {reason}", out)
    if (found := first_in_use(DCP_FEATURES, server)) is not None:
        feature, text = found
        ways = leave_out_one("--dcp-size", feature.flag, text="leave out one of them")
        raise Refusal(f"{ours} and {text}: {feature.reason}", *ways)
    if env.flag(env.PREFILL_READS_ROWS):
        raise Refusal(
            f"{ours} and {env.PREFILL_READS_ROWS}=1: the rows of a prefill's new tokens are stored on "
            "several ranks",
            leave_out("--dcp-size", text="leave out one of them"),
        )


def check_backends(server: Server) -> None:
    """Refuse other attention backends than ours, whatever rows they read."""
    others = [backend for backend in server.backends if backend != KVPOOL_BACKEND]
    if server.view.dcp_size > 1 and others:
        raise Refusal(
            f"--dcp-size {server.view.dcp_size} with {LAYOUT.flag} {server.layout} needs attention backend "
            f"{KVPOOL_BACKEND} in all phases, and {others[0]} has not been tested over these pools",
            ALONE,
        )
