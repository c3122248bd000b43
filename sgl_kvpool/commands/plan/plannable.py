"""Servers that cannot start, or that `plan` cannot size, although SGLang accepts their arguments."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sgl_kvpool.sglang_plugin.rules.arguments import NUMBERS
from sgl_kvpool.sglang_plugin.rules.attention import check_ranks
from sgl_kvpool.sglang_plugin.server import Server
from sgl_kvpool.srt.model import Model

#: Fields of config.json that determine sizes, each with its alternative names. If one is missing,
#: transformers uses the value of one model of the family, such as a latent of 512.
_GEOMETRY = (
    ("kv_lora_rank",),
    ("qk_rope_head_dim",),
    ("num_attention_heads",),
    ("num_hidden_layers", "num_layers", "n_layers"),
)


class IncompleteConfig(ValueError):
    """A config.json without the sizes that a plan needs, for any layout."""


class TooHeavy(ValueError):
    """The weights leave no memory for rows on a GPU.

    `ranks`: `tp_size`, `attention_ranks` that share the attention heads, and the `heads`, which these divide.
    """

    def __init__(self, reason: str, **ranks: int):
        super().__init__(reason)
        self.ranks = ranks


def check_geometry(model_config: Any, folder: Path) -> None:
    """Raise IncompleteConfig if config.json lacks a field that determines the size of a cache."""
    file = folder / "config.json"
    if not file.is_file():  # a format or a place that only SGLang knows
        return
    given = {name for name, _ in _fields(json.loads(file.read_text(encoding="utf-8", errors="replace")))}
    if missing := [names[0] for names in _GEOMETRY if not given.intersection(names)]:
        name = Model(model_config).model_name
        raise IncompleteConfig(
            f"config.json of {name} lacks {' and '.join(missing)}, which the cache's size depends on, and "
            "another model's default would be used; take the checkpoint's config.json"
        )


def check_sizes(config: dict[str, Any]) -> None:
    """Raise ValueError unless sizes are whole numbers above 0 (rope: 0 or more); SGLang does not check."""
    names = {"max_position_embeddings", *(name for names in _GEOMETRY for name in names)}
    for name, value in _fields(config):
        least = 0 if name == "qk_rope_head_dim" else 1
        if name in names and (type(value) is not int or value < least):
            raise ValueError(f"config.json has {name} {value!r}; it must be a whole number, {least} or more")


def _fields(config: Any) -> Iterator[tuple[str, Any]]:
    """All fields with a value, including those of nested configurations."""
    if isinstance(config, dict):
        for name, value in config.items():
            if value is not None:
                yield name, value
            yield from _fields(value)


def check_plannable(server: Server) -> None:
    """Raise ValueError for models without a layout, and for arguments that are invalid or not supported."""
    from sglang.srt.arg_groups.model_override_base import use_mla_backend

    server_args, view, model_config = server.server_args, server.view, server.model_config
    if not use_mla_backend(server_args) or model_config.is_hybrid_swa:
        kind = "sliding windows" if model_config.is_hybrid_swa else "no multi-head latent attention (MLA)"
        raise ValueError(f"{server.model_name} has {kind}: sgl-kvpool has no layout for its cache")
    for number in NUMBERS:  # the user's, which SGLang does not check
        number.check(server_args)
    layers = model_config.num_hidden_layers
    if view.pp_size > layers:
        raise ValueError(f"--pp-size {view.pp_size} is more than the {layers} layers; give {layers} at most")
    ranks = view.tp_size * view.pp_size
    if view.nnodes < 1 or ranks % view.nnodes:
        raise ValueError(f"--nnodes {view.nnodes} does not divide {ranks} ranks; give a divisor of {ranks}")
    check_ranks(server)


def check_heads(model_config: Any) -> None:
    """Raise ValueError if SGLang's attention layers would raise it when the model is built."""
    from sglang.srt.runtime_context import get_parallel

    heads, ranks = model_config.num_attention_heads, get_parallel().attn_tp_size
    if heads % ranks:
        raise ValueError(
            f"{ranks} attention ranks do not divide the {heads} heads of "
            f"{Model(model_config).model_name}; give --tp a divisor of them"
        )


def check_weights(weights_gib: float, machine: Any, view: Any, model_config: Any) -> None:
    """Raise ValueError if no memory is left for rows; without a pipeline TooHeavy, which is one.

    SGLang's own error may suggest a --mem-fraction-static above 1. That is the share of the memory free
    before loading that weights and rows may take.
    """
    from sglang.srt.runtime_context import get_parallel

    gpus, fraction = view.tp_size * view.pp_size, view.mem_fraction_static
    free_gib, rank_gib = machine.gpu_gib - machine.taken_gib, weights_gib / gpus
    if fraction <= 0:
        raise ValueError(
            f"--gpu-gb {machine.gpu_gib:g} is less memory than SGLang reserves beside weights and rows: it "
            f"would set --mem-fraction-static to {fraction:g}; give a larger --gpu-gb"
        )
    if rank_gib < free_gib * fraction:
        return
    what = (
        f"{round(weights_gib, 1):g} GiB of weights do not fit {gpus} x {machine.gpu_gib:g} GiB: each GPU "
        f"would hold {rank_gib:.1f} GiB of them"
    )
    if rank_gib >= free_gib:
        why = f"and has {free_gib:g} GiB before they are loaded (--taken-gb {machine.taken_gib:g})"
    else:
        why = (
            f"and --mem-fraction-static {fraction:g} gives weights and rows {free_gib * fraction:.1f} GiB "
            f"together; the fraction that the weights need, above {rank_gib / free_gib:.3f}, would leave "
            f"less than {free_gib - rank_gib:.1f} GiB for everything else"
        )
    if view.pp_size > 1:
        raise ValueError(f"{what}, {why}")
    ranks, heads = get_parallel().attn_tp_size, model_config.num_attention_heads
    raise TooHeavy(f"{what}, {why}", tp_size=view.tp_size, attention_ranks=ranks, heads=heads)


def check_drafts(server: Server, configurator: Any) -> None:
    """Raise ValueError if SGLang's loader of MTP layers would raise it after the target is loaded."""
    if not configurator.spec_algorithm.is_eagle() or server.has_own_draft:
        return
    draft_config = configurator.spec_aux_config.draft_model_config
    if draft_config is None or not draft_config.num_nextn_predict_layers:
        raise ValueError(
            f"--speculative-algorithm {server.view.speculative_algorithm}: {server.model_name} "
            "has no MTP layers (num_nextn_predict_layers of its config.json); name a draft with "
            "--speculative-draft-model-path"
        )
