"""Servers that start on no GPU, or that `plan` has no numbers for, though SGLang takes their arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sgl_kvpool.sglang_plugin.models import model_name

__all__ = ["check_drafts", "check_heads", "check_plannable", "has_own_draft"]


def check_plannable(server_args: Any, view: Any, model_config: Any) -> None:
    """ValueError for other models than those of MLA, and for arguments that are not planned."""
    from sglang.srt.arg_groups.model_override_base import use_mla_backend

    if not use_mla_backend(server_args) or model_config.is_hybrid_swa:
        kind = "sliding windows" if model_config.is_hybrid_swa else "no multi-head latent attention (MLA)"
        raise ValueError(f"{model_name(model_config)} has {kind}: there is no layout for its cache")
    if view.pp_size > 1:
        raise ValueError(
            f"--pp-size {view.pp_size}: a pipeline's stages have pools of different sizes, which this does "
            "not plan; leave it out"
        )
    if view.mem_fraction_static > 1:
        raise ValueError(
            f"--mem-fraction-static {view.mem_fraction_static:g} is more than a GPU has, and SGLang sizes a "
            "cache for it that cannot be allocated; give a number below 1"
        )
    if view.page_size < 1:
        raise ValueError(f"--page-size {view.page_size} is no number of tokens; give 1 or more")
    if view.dcp_size > 1:
        raise ValueError(
            f"--dcp-size {view.dcp_size}: ranks that keep parts of a request's tokens are not planned, and "
            "no layout takes them; leave it out"
        )
    if view.max_total_tokens is not None:
        raise ValueError(
            "--max-total-tokens gives the answer that is asked for; leave it out of the server's arguments"
        )


def check_heads(model_config: Any) -> None:
    """ValueError where SGLang's attention layers have one, once the model is built."""
    from sglang.srt.runtime_context import get_parallel

    heads, ranks = model_config.num_attention_heads, get_parallel().attn_tp_size
    if heads % ranks:
        raise ValueError(
            f"{ranks} ranks of attention do not divide the {heads} heads of {model_name(model_config)}; give "
            "--tp a divisor of them"
        )


def check_drafts(view: Any, configurator: Any) -> None:
    """ValueError where SGLang's loader of MTP layers has one, once the target is loaded."""
    if not configurator.spec_algorithm.is_eagle() or has_own_draft(view):
        return
    draft_config = configurator.spec_aux_config.draft_model_config
    if draft_config is None or not draft_config.num_nextn_predict_layers:
        raise ValueError(
            f"--speculative-algorithm {view.speculative_algorithm}: {model_name(configurator.model_config)} "
            "comes without MTP layers (num_nextn_predict_layers of its config.json); name a draft with "
            "--speculative-draft-model-path"
        )


def has_own_draft(view: Any) -> bool:
    """Whether the draft model is another checkpoint than the target's."""
    draft, target = view.speculative_draft_model_path, view.model_path
    if draft is None or draft == target:
        return False
    # Two spellings of one folder are one checkpoint.
    return not (Path(draft).is_dir() and Path(draft).resolve() == Path(target).resolve())
