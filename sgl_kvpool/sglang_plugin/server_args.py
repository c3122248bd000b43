"""The argument: `--kv-cache-layout`, its Engine keyword and its environment variable, and what follows.

The layout travels as a string in an underscore attribute of SGLang's `ServerArgs`, which SGLang pickles
into every process of the server. Decisions are declared in SGLang's own resolution steps.
"""

from __future__ import annotations

import sys
from typing import Any

from sgl_kvpool import env
from sgl_kvpool.attention.readers import KVPOOL_BACKEND, can_read
from sgl_kvpool.layout import MLAKVCacheLayout
from sgl_kvpool.sglang_plugin import launching, refusals, seams
from sgl_kvpool.sglang_plugin.record import ATTRIBUTE, AUTO, layout_of

__all__ = ["AUTO", "choices", "install", "require_decided"]

_SOURCE = "sgl_kvpool"
_installed = False
#: Whether some record of this process was asked for a layout by flag or keyword.
_was_asked = False


def choices() -> list[str]:
    """Values of `--kv-cache-layout`."""
    return [AUTO, *(layout.value for layout in MLAKVCacheLayout)]


def require_decided(server_args: Any) -> None:
    """RuntimeError for a record that was resolved before the plugin was loaded.

    Its process was told to serve a layout (by the environment), but no argument was checked and SGLang
    was not shown the layout's dtype.
    """
    if getattr(server_args, ATTRIBUTE, None) is None:
        raise RuntimeError(
            f"{env.KV_CACHE_LAYOUT} asks for a layout, but the server's arguments were resolved before "
            "SGLang's plugins were loaded; call sglang.srt.plugins.load_plugins() before ServerArgs(...), "
            "or start the server with --kv-cache-layout"
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
    # The ways to ask come last: whatever fails before leaves the argument unknown, never ignored.
    seams.wrap("sglang.srt.server_args.ServerArgs.add_cli_args", _add_cli_args)
    seams.wrap("sglang.srt.server_args.ServerArgs.from_cli_args", _from_cli_args)
    seams.wrap("sglang.srt.plugins.load_plugins", _load_plugins)
    _extend_engine()


# -------------------------------------------------------------------- three ways to ask


def _add_cli_args(original, parser):
    original(parser)
    parser.add_argument(
        "--kv-cache-layout",
        dest="kv_cache_layout",
        choices=choices(),
        default=None,
        help="[sgl-kvpool] The bytes of an MLA KV cache row: pool, memory budget and attention follow. "
        f"'{AUTO}' (as without the argument) is SGLang as it is. Also {env.KV_CACHE_LAYOUT}.",
    )


def _from_cli_args(original, cls, args):
    server_args = original(cls, args)
    _remember(server_args, getattr(args, "kv_cache_layout", None))
    return server_args


def _remember(server_args: Any, value: str | None) -> None:
    """Keep what the user wrote on the record; None for nothing."""
    global _was_asked
    setattr(server_args, ATTRIBUTE, value)
    _was_asked = _was_asked or value not in (None, AUTO)


def _load_plugins(original):
    """Every Engine calls this before it looks for its class of arguments."""
    original()
    _extend_engine()


def _extend_engine() -> None:
    """Let `Engine(...)` take the keyword, once its module is imported; the command line does not need it.

    Not a REPLACE hook of SGLang's, which would reach every binding of ServerArgs.
    """
    module = sys.modules.get("sglang.srt.entrypoints.engine")
    if module is None or hasattr(module.Engine.server_args_class, ATTRIBUTE):
        return
    build = _engine_server_args(module.Engine.server_args_class)
    module.Engine.server_args_class = staticmethod(build)


def _engine_server_args(previous):
    """`ServerArgs(**kwargs)` that also takes `kv_cache_layout`."""

    def build(**kwargs):
        value = kwargs.pop("kv_cache_layout", None)
        if value is not None and value != AUTO:
            if value not in choices():
                raise ValueError(f"kv_cache_layout={value!r} is not one of: {', '.join(choices())}")
            value = MLAKVCacheLayout.parse(value).value
        server_args = previous(**kwargs)
        _remember(server_args, value)
        return server_args

    setattr(build, ATTRIBUTE, None)
    return build


def _requested(server_args: Any) -> MLAKVCacheLayout | None:
    """What flag or keyword and environment say together; ValueError if they contradict each other."""
    written = getattr(server_args, ATTRIBUTE, None)
    exported = env.text(env.KV_CACHE_LAYOUT)
    if exported is not None and exported not in choices():
        raise ValueError(
            f"{env.KV_CACHE_LAYOUT}={exported!r} is not a KV cache layout; choose one of: "
            f"{', '.join(choices())}"
        )
    if written is not None and exported is not None and written != exported:
        raise ValueError(
            f"the KV cache layout is {written!r} as argument (--kv-cache-layout or kv_cache_layout=) but "
            f"{exported!r} in the environment ({env.KV_CACHE_LAYOUT}); give one of them, or the same"
        )
    if exported is None and _was_asked and ATTRIBUTE not in vars(server_args):
        # copy.copy, msgspec.structs.replace and ServerArgs(**fields) copy fields and nothing else.
        raise ValueError(
            "this ServerArgs does not say whether it was asked for a KV cache layout, and another one of "
            f"this process was; if it is a copy, use copy.deepcopy, and say which with {env.KV_CACHE_LAYOUT}="
            f"{'|'.join(choices())}"
        )
    value = written or exported or AUTO
    return None if value == AUTO else MLAKVCacheLayout.parse(value)


# -------------------------------------------------------------------- resolution steps


def _decide(server_args, previous):
    """First step: fix the layout and the `kv_cache_dtype` that SGLang is shown."""
    layout = _requested(server_args)
    setattr(server_args, ATTRIBUTE, AUTO if layout is None else layout.value)
    if layout is not None:
        from sglang.srt.arg_groups.overrides import declare_resolution

        # A value that is neither yes nor no is an error now, not in a scheduler.
        for name in (env.PREFILL_READS_ROWS, env.CHECK_FINITE):
            env.flag(name)
        refusals.check_dtype(layout, server_args.kv_cache_dtype)
        refusals.check_features(layout, server_args)
        # Never left "auto": a checkpoint with an FP8 KV cache would turn it into fp8_e4m3.
        declare_resolution(server_args, _SOURCE, kv_cache_dtype=layout.sglang_kv_cache_dtype(is_dsa=False))
    previous(server_args)


def _check_model(server_args, previous):
    """Before SGLang adjusts anything to the model: it must be one whose rows we store."""
    layout = layout_of(server_args)
    if layout is not None:
        from sglang.srt.arg_groups.overrides import model_config_of

        refusals.check_model(layout, model_config_of(server_args))
    previous(server_args)


def _choose_backend(server_args, previous):
    """Before SGLang picks an attention backend: ours for every phase the user named none for.

    Decided from the record's fields, which hold what the user wrote; by now the resolving view already
    holds SGLang's defaults for the platform.
    """
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

    layout = layout_of(server_args)
    named = {
        "--attention-backend": server_args.attention_backend,
        "--prefill-attention-backend": server_args.prefill_attention_backend,
        "--decode-attention-backend": server_args.decode_attention_backend,
    }
    if layout is None:
        for flag, backend in named.items():
            if backend == KVPOOL_BACKEND:
                raise ValueError(
                    f"{flag} {KVPOOL_BACKEND} reads pools of sgl-kvpool; add --kv-cache-layout "
                    f"({', '.join(choices()[1:])})"
                )
        previous(server_args)
        return
    for flag, backend in named.items():
        if backend is not None and not can_read(backend, layout):
            raise ValueError(refusals.unreadable(flag, backend, layout))
    phases = (server_args.prefill_attention_backend, server_args.decode_attention_backend)
    if server_args.attention_backend is None and None in phases:
        declare_resolution(server_args, _SOURCE, attention_backend=KVPOOL_BACKEND)
    view = resolving_view(server_args)
    refusals.check_backends(layout, view)
    if KVPOOL_BACKEND in refusals.backends_in_use(view):
        _disable_cuda_graphs(server_args, declare_resolution, view)
    previous(server_args)


def _disable_cuda_graphs(server_args, declare_resolution, view) -> None:
    """As SGLang does for torch_native: there is nothing to capture on a CPU."""
    from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, with_phase

    for phase in (Phase.DECODE, Phase.PREFILL):
        config = with_phase(view.cuda_graph_config, phase, backend=Backend.DISABLED)
        declare_resolution(server_args, _SOURCE, cuda_graph_config=config)


def _finish(server_args, previous):
    """Last step: nothing that SGLang resolved on the way may contradict the layout."""
    previous(server_args)
    layout = layout_of(server_args)
    if layout is None:
        return
    from sglang.srt.arg_groups.overrides import resolving_view

    view = resolving_view(server_args)
    refusals.check_features(layout, view)
    refusals.check_backends(layout, view)
    shown = layout.sglang_kv_cache_dtype(is_dsa=False)
    if view.kv_cache_dtype != shown:
        raise ValueError(
            f"SGLang resolved --kv-cache-dtype to {view.kv_cache_dtype}, but layout {layout} is shown as "
            f"{shown}; another plugin or model rule changed it"
        )
    launching.install()
