"""Models whose KV cache no layout stores, and the dtype under which SGLang sees a layout."""

from sgl_kvpool.refusal import Refusal, leave_out
from sgl_kvpool.sglang_plugin.options import LAYOUT
from sgl_kvpool.sglang_plugin.server import Server


def check_model(server: Server) -> None:
    """Refuse models whose KV cache is not MLA, or whose geometry no layout stores."""
    from sglang.srt.configs.model_config import AttentionArch

    layout, name, model_config = server.layout, server.model_name, server.model_config
    way = leave_out(LAYOUT.flag, text=f"serve it without {LAYOUT.flag}")
    if model_config.attention_arch != AttentionArch.MLA:
        raise Refusal(
            f"--kv-cache-layout {layout} stores rows of multi-head latent attention (MLA), and {name} "
            f"uses {model_config.attention_arch.name}",
            way,
        )
    if server.is_hybrid and not server.layers_with_rows:
        raise Refusal(
            f"--kv-cache-layout {layout} stores rows of multi-head latent attention (MLA), and all "
            f"{model_config.num_hidden_layers} layers of {name} keep states instead",
            way,
        )
    if model_config.is_hybrid_swa:
        raise Refusal(
            f"{name} mixes MLA with sliding windows, which --kv-cache-layout {layout} does not support", way
        )
    _ = server.row_format  # refuses the geometry


def declare_dtype(server: Server) -> dict[str, str]:
    """The dtype of a layout, never "auto": an FP8 checkpoint would turn that into fp8_e4m3."""
    return {"kv_cache_dtype": server.layout.sglang_kv_cache_dtype(is_dsa=server.is_dsa)}


def check_resolved_dtype(server: Server) -> None:
    """Refuse another dtype than the one that was declared to SGLang."""
    resolved, (declared,) = server.view.kv_cache_dtype, declare_dtype(server).values()
    if resolved != declared:
        raise Refusal(
            f"SGLang resolved --kv-cache-dtype to {resolved}, but layout {server.layout} declares "
            f"{declared}; another plugin or model rule changed it"
        )
