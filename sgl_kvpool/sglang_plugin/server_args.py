"""Our arguments on SGLang's command line and in its Engine, and what follows from them.

What was asked for travels as strings in underscore attributes of SGLang's `ServerArgs` (:mod:`.record`).
Decisions are declared in SGLang's own resolution steps.
"""

from __future__ import annotations

import sys
from typing import Any

from sgl_kvpool import env
from sgl_kvpool.attention.readers import KVPOOL_BACKEND
from sgl_kvpool.layout import MLAKVCacheLayout
from sgl_kvpool.sglang_plugin import attention_rules, dsa_rules, launching, refusals, seams
from sgl_kvpool.sglang_plugin.models import host_tier_page_size, is_dsa, keeps_states_by_token
from sgl_kvpool.sglang_plugin.record import LAYOUT, OPTIONS, arrangement_of, host_tier_of, layout_of

__all__ = ["install", "require_decided"]

_SOURCE = "sgl_kvpool"
#: Of the function that takes our Engine keywords.
_EXTENDED = "_kvpool_extended"
_installed = False


def require_decided(server_args: Any) -> None:
    """RuntimeError for a record that was resolved before the plugin was loaded.

    Its process was told to serve a layout (by the environment), but no argument was checked and SGLang
    was not shown the layout's dtype.
    """
    if getattr(server_args, LAYOUT.attribute, None) is None:
        raise RuntimeError(
            f"{LAYOUT.env} asks for a layout, but the server's arguments were resolved before "
            "SGLang's plugins were loaded; call sglang.srt.plugins.load_plugins() before ServerArgs(...), "
            f"or start the server with {LAYOUT.flag}"
        )


def install() -> None:
    """Hook the arguments; safe to call again."""
    global _installed
    if _installed:
        return
    _installed = True
    from sglang.srt.arg_groups.choices import add_attention_backend_choices
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

    for step, hook in zip(seams.STEPS, (_decide, _check_model, _choose_backend, _finish), strict=True):
        register_resolution_hook(step)(hook)
    add_attention_backend_choices([KVPOOL_BACKEND])
    # The ways to ask come last: whatever fails before leaves the arguments unknown, never ignored.
    seams.wrap("sglang.srt.server_args.ServerArgs.add_cli_args", _add_cli_args)
    seams.wrap("sglang.srt.server_args.ServerArgs.from_cli_args", _from_cli_args)
    seams.wrap("sglang.srt.plugins.load_plugins", _load_plugins)
    _extend_engine()


# -------------------------------------------------------------------- three ways to ask


def _add_cli_args(original, parser):
    original(parser)
    for option in OPTIONS:
        parser.add_argument(
            option.flag,
            dest=option.name,
            choices=option.choices,
            default=None,
            help=f"[sgl-kvpool] {option.help} Also {option.env}.",
        )


def _from_cli_args(original, cls, args):
    server_args = original(cls, args)
    for option in OPTIONS:
        option.remember(server_args, getattr(args, option.name, None))
    return server_args


def _load_plugins(original):
    """Every Engine calls this before it looks for its class of arguments."""
    original()
    _extend_engine()


def _extend_engine() -> None:
    """Let `Engine(...)` take the keywords, once its module is imported; the command line does not need it.

    Not a REPLACE hook of SGLang's, which would reach every binding of ServerArgs.
    """
    module = sys.modules.get("sglang.srt.entrypoints.engine")
    if module is None or hasattr(module.Engine.server_args_class, _EXTENDED):
        return
    build = _engine_server_args(module.Engine.server_args_class)
    module.Engine.server_args_class = staticmethod(build)


def _engine_server_args(previous):
    """`ServerArgs(**kwargs)` that also takes our keywords."""

    def build(**kwargs):
        values = {option: option.keyword(kwargs.pop(option.name, None)) for option in OPTIONS}
        server_args = previous(**kwargs)
        for option, value in values.items():
            option.remember(server_args, value)
        return server_args

    setattr(build, _EXTENDED, True)
    return build


# -------------------------------------------------------------------- resolution steps


def _decide(server_args, previous):
    """First step: fix layout and arrangement."""
    requested = {option: option.requested(server_args) for option in OPTIONS}
    for option, value in requested.items():
        setattr(server_args, option.attribute, value)
    layout = layout_of(server_args)
    for option, value in requested.items():
        if layout is None and option is not LAYOUT and value != option.default:
            raise ValueError(
                f"{option.flag} {value} (or {option.env}) is about pools of sgl-kvpool, and this server has "
                f"none without a layout; leave it out, or add {LAYOUT.flag} {MLAKVCacheLayout.BF16}, which "
                "keeps SGLang's rows"
            )
    if layout is not None:
        # A value that is neither yes nor no is an error now, not in a scheduler.
        for name in (env.PREFILL_READS_ROWS, env.CHECK_FINITE, env.FIX_TOPK):
            env.flag(name)
        refusals.check_features(layout, arrangement_of(server_args), server_args)
    previous(server_args)


def _check_model(server_args, previous):
    """Before SGLang adjusts anything to the model: it must be one whose rows we store.

    Fixes the `kv_cache_dtype` that SGLang is shown, for sparse attention its implementations, and otherwise
    the page size that a host tier has unless the user names one.
    """
    layout = layout_of(server_args)
    if layout is not None:
        from sglang.srt.arg_groups.overrides import declare_resolution, model_config_of, resolving_view

        model_config = model_config_of(server_args)
        refusals.check_model(layout, model_config)
        if is_dsa(model_config):
            declared = dsa_rules.prepare(layout, arrangement_of(server_args), model_config, server_args)
        else:
            refusals.check_dtype(layout, server_args.kv_cache_dtype, is_dsa=False)
            declared = {"kv_cache_dtype": layout.sglang_kv_cache_dtype(is_dsa=False)}
            view = resolving_view(server_args)
            sized = view.page_size is not None or keeps_states_by_token(model_config, view)
            if refusals.has_host_tier(view) and not sized:
                # SGLang's default is 1 with most backends: host pages of a row, a key and a digest for each.
                declared["page_size"] = host_tier_page_size(model_config, view)
        # The dtype is never left "auto": a checkpoint with an FP8 KV cache would turn it into fp8_e4m3.
        declare_resolution(server_args, _SOURCE, **declared)
    previous(server_args)


def _choose_backend(server_args, previous):
    """Before SGLang picks an attention backend: ours for every phase the user named none for, if it is due.

    Decided from the record's fields, which hold what the user wrote; by now the resolving view already
    holds SGLang's defaults for the platform.
    """
    from sglang.srt.arg_groups.overrides import declare_resolution, model_config_of, resolving_view

    layout, arrangement = layout_of(server_args), arrangement_of(server_args)
    named = {
        "--attention-backend": server_args.attention_backend,
        "--prefill-attention-backend": server_args.prefill_attention_backend,
        "--decode-attention-backend": server_args.decode_attention_backend,
    }
    if layout is None:
        draft = {"--speculative-draft-attention-backend": server_args.speculative_draft_attention_backend}
        for flag, backend in (named | draft).items():
            if backend == KVPOOL_BACKEND:
                raise ValueError(
                    f"{flag} {KVPOOL_BACKEND} reads pools of sgl-kvpool; add {LAYOUT.flag} "
                    f"({', '.join(LAYOUT.values)})"
                )
        previous(server_args)
        return
    if is_dsa(model_config_of(server_args)):
        previous(server_args)  # SGLang has one backend for sparse attention
        return
    common, *phases = named.values()
    attention_rules.check_named(layout, arrangement, common, *phases)
    view = resolving_view(server_args)
    if common is None and None in phases:
        if attention_rules.is_chosen(layout, arrangement, view.device):
            declare_resolution(server_args, _SOURCE, attention_backend=KVPOOL_BACKEND)
        else:
            previous(server_args)  # SGLang's choice, which the last step looks at
            return
    attention_rules.check_backends(layout, arrangement, view)
    if view.device == "cpu" and KVPOOL_BACKEND in attention_rules.backends_in_use(view):
        _disable_cuda_graphs(server_args, declare_resolution, view)
    previous(server_args)


def _disable_cuda_graphs(server_args, declare_resolution, view) -> None:
    """As SGLang does for torch_native: there is nothing to capture on a CPU."""
    from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, with_phase

    for phase in (Phase.DECODE, Phase.PREFILL):
        config = with_phase(view.cuda_graph_config, phase, backend=Backend.DISABLED)
        declare_resolution(server_args, _SOURCE, cuda_graph_config=config)


def _finish(server_args, previous):
    """Last step: nothing that SGLang resolved on the way may contradict layout and arrangement."""
    previous(server_args)
    layout, arrangement = layout_of(server_args), arrangement_of(server_args)
    if layout is None and not env.flag(env.FIX_TOPK):
        return
    from sglang.srt.arg_groups.overrides import model_config_of, resolving_view

    view, model_config = resolving_view(server_args), model_config_of(server_args)
    sparse = is_dsa(model_config)
    if layout is None:
        if sparse:
            dsa_rules.check_stock(model_config, view)
        return
    refusals.check_features(layout, arrangement, view)
    refusals.check_host_tier(layout, arrangement, host_tier_of(server_args), view)
    if refusals.has_host_tier(view):
        refusals.check_host_model(layout, arrangement, host_tier_of(server_args), model_config, view)
    if sparse:
        dsa_rules.check_resolved(layout, model_config, view)
    else:
        attention_rules.check_backends(layout, arrangement, view)
        attention_rules.check_model(model_config, view)
    shown = layout.sglang_kv_cache_dtype(is_dsa=sparse)
    if view.kv_cache_dtype != shown:
        raise ValueError(
            f"SGLang resolved --kv-cache-dtype to {view.kv_cache_dtype}, but layout {layout} is shown as "
            f"{shown}; another plugin or model rule changed it"
        )
    launching.install()
