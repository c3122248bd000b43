"""The plugin's arguments on SGLang's command line and in its Engine, and the decisions that follow from them.

Values travel as strings in underscore attributes of SGLang's `ServerArgs`
(:mod:`sgl_kvpool.sglang_plugin.options`). Decisions are declared in SGLang's own resolution steps.
"""

import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from sgl_kvpool import env
from sgl_kvpool.attention.readers import KVPOOL_BACKEND
from sgl_kvpool.refusal import Refusal, print_without_traceback
from sgl_kvpool.sglang_plugin import hook_groups, models, options
from sgl_kvpool.sglang_plugin.hooks import launching
from sgl_kvpool.sglang_plugin.models import is_dsa
from sgl_kvpool.sglang_plugin.registry import around, fields, installs, uses
from sgl_kvpool.sglang_plugin.rules import arguments as argument_rules
from sgl_kvpool.sglang_plugin.rules import attention as attention_rules
from sgl_kvpool.sglang_plugin.rules import dcp as dcp_rules
from sgl_kvpool.sglang_plugin.rules import dsa as dsa_rules
from sgl_kvpool.sglang_plugin.rules import host_tier as host_tier_rules
from sgl_kvpool.sglang_plugin.rules.features import BACKEND_FIELDS
from sgl_kvpool.sglang_plugin.rules.host_sharing import choose_sharing

_SOURCE = "sgl_kvpool"
_ARGS = "sglang.srt.server_args.ServerArgs"
_ARG_GROUPS = "sglang.srt.arg_groups"
logger = logging.getLogger(__name__)

#: Attribute that marks the function which takes our Engine keywords.
_EXTENDED = "_kvpool_extended"
_installed = False


uses(f"{_ARG_GROUPS}.resolution_hooks.register_resolution_hook", "arguments", takes=("name",))
uses(f"{_ARG_GROUPS}.overrides.declare_resolution", "arguments", takes=("server_args", "source"))
uses(f"{_ARG_GROUPS}.overrides.resolving_view", "arguments", takes=("server_args",))
uses(f"{_ARG_GROUPS}.overrides.model_config_of", "arguments", takes=("server_args",))
fields("cuda_graph_config", "kv_cache_dtype", "page_size", "rl_on_policy_target")


def require_decided(server_args: Any) -> None:
    """Raise RuntimeError for a `ServerArgs` that was resolved before the plugin was loaded.

    The hooks that call this are applied because the environment requests a layout, but no argument was
    checked, and the layout's dtype was not declared to SGLang.
    """
    if getattr(server_args, options.LAYOUT.attribute, None) is None:
        raise RuntimeError(
            f"{options.LAYOUT.env} requests a layout, but the server's arguments were resolved before "
            "SGLang's plugins were loaded; call sglang.srt.plugins.load_plugins() before ServerArgs(...), "
            f"or start the server with {options.LAYOUT.flag}"
        )


@installs("arguments")
def _install() -> None:
    global _installed
    if _installed:
        return
    _installed = True
    from sglang.srt.arg_groups.choices import (
        add_attention_backend_choices,
        add_deterministic_attention_backend_choices,
        add_radix_supported_deterministic_attention_backend_choices,
    )
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

    for name, step in STEPS.items():
        register_resolution_hook(name)(step)
    add_attention_backend_choices([KVPOOL_BACKEND])
    add_deterministic_attention_backend_choices([KVPOOL_BACKEND])
    add_radix_supported_deterministic_attention_backend_choices([KVPOOL_BACKEND])
    # Keywords are added last, and flags by a hook after this: if a line above fails, SGLang rejects them as
    # unknown.
    _extend_engine()


@around(f"{_ARGS}.add_cli_args", "arguments")
def _add_cli_args(original, parser):
    """Add our arguments, which are also keys of `--config` YAML."""
    original(parser)
    for option in options.OPTIONS:
        parser.add_argument(
            option.flag,
            dest=option.name,
            # `choices` would make argparse print the usage of all of SGLang's arguments before the error.
            metavar=f"{{{','.join(option.choices)}}}",
            default=None,
            help=f"[sgl-kvpool] {option.help} Also {option.env}.",
        )


@around(f"{_ARGS}.from_cli_args", "arguments")
def _from_cli_args(original, cls, args):
    """Store and check the values in underscore attributes, which SGLang pickles into its children.

    SGLang drops unknown fields. Models and kernels are not imported yet.
    """
    server_args = original(cls, args)
    options.from_command_line(server_args)
    with _without_traceback(server_args):
        for option in options.OPTIONS:
            value = getattr(args, option.name, None)
            option.store(server_args, option.parse(value, f"{option.flag} "))
        argument_rules.check(server_args)
    return server_args


@contextmanager
def _without_traceback(server_args: Any) -> Iterator[None]:
    """Make a refusal of command-line arguments the last line that the process prints."""
    try:
        yield
    except Refusal as refusal:
        if options.is_from_command_line(server_args):
            print_without_traceback(refusal)
        raise


@around("sglang.srt.plugins.load_plugins", "arguments")
def _load_plugins(original):
    """Extend the Engine: every Engine calls `load_plugins` before it reads `server_args_class`."""
    original()
    _extend_engine()


def _extend_engine() -> None:
    """Make `Engine(...)` accept our keywords if its module is imported; the command line does not use them.

    A REPLACE hook of SGLang is not used, since it would change every binding of ServerArgs.
    """
    module = sys.modules.get("sglang.srt.entrypoints.engine")
    if module is None or hasattr(module.Engine.server_args_class, _EXTENDED):
        return
    build = _engine_server_args(module.Engine.server_args_class)
    module.Engine.server_args_class = staticmethod(build)


def _engine_server_args(previous):
    """`ServerArgs(**kwargs)` that also takes our keywords."""

    def build(**kwargs):
        values = {option: kwargs.pop(option.name, None) for option in options.OPTIONS}
        server_args = previous(**kwargs)
        for option, value in values.items():
            option.store(server_args, option.parse(value, f"{option.name}="))
        argument_rules.check(server_args)
        return server_args

    setattr(build, _EXTENDED, True)
    return build


def _step(rule, *, first=True):
    """Wrap one step of SGLang's argument resolution: our rule before SGLang's step, or after it."""

    def step(server_args, previous):
        if not first:
            previous(server_args)
        with _without_traceback(server_args):
            rule(server_args)
        if first:
            previous(server_args)

    return step


def _decide(server_args):
    """Before SGLang's first step, check the arguments and set every option to its requested value."""
    for option, value in argument_rules.check(server_args).items():
        setattr(server_args, option.attribute, value)
    if options.layout_of(server_args) is not None or env.flag(env.FIX_TOPK):
        hook_groups.require((hook_groups.MODEL_RULES,))


def _check_model(server_args):
    """Before SGLang adjusts arguments to the model, refuse a model whose rows no layout stores.

    The rule declares `kv_cache_dtype`. For sparse attention it also declares the implementations if SGLang's
    kernels cannot read the rows. For other models with a host tier it declares the page size, unless the user
    sets one or the prefix cache needs pages of one token.
    """
    layout = options.layout_of(server_args)
    if layout is None:
        return
    from sglang.srt.arg_groups.overrides import declare_resolution, model_config_of, resolving_view

    model_config = model_config_of(server_args)
    models.check_model(layout, model_config)
    dcp_rules.check(layout, model_config, resolving_view(server_args))
    if is_dsa(model_config):
        declared = dsa_rules.prepare(layout, options.arrangement_of(server_args), model_config, server_args)
    else:
        declared = {"kv_cache_dtype": layout.sglang_kv_cache_dtype(is_dsa=False)}
        view = resolving_view(server_args)
        sized = view.page_size is not None or models.keeps_states_by_token(model_config, view)
        if host_tier_rules.has_host_tier(view) and not sized:
            # SGLang's default is 1 with most backends: every row would be a host page with a key and a
            # checksum.
            declared["page_size"] = models.host_tier_page_size(model_config, view)
    # The dtype is never left "auto": a checkpoint with an FP8 KV cache would turn it into fp8_e4m3.
    declare_resolution(server_args, _SOURCE, **declared)


def _choose_backend(server_args):
    """Before SGLang picks attention backends, use ours in phases without an explicit one if `is_chosen`.

    The rule reads the fields of `ServerArgs`, which hold the user's values; the resolving view already holds
    SGLang's defaults for the platform.
    """
    layout, arrangement = options.layout_of(server_args), options.arrangement_of(server_args)
    if layout is None:
        return
    from sglang.srt.arg_groups.overrides import declare_resolution, model_config_of, resolving_view

    if is_dsa(model_config_of(server_args)):
        return  # SGLang has one backend for sparse attention
    common, *phases = (getattr(server_args, field) for field in BACKEND_FIELDS)
    view = resolving_view(server_args)
    attention_rules.check_named(layout, arrangement, view, common, *phases)
    for phase in attention_rules.phases_taken_over(layout, common, *phases):
        logger.info(
            "sgl-kvpool: --%s-attention-backend %s (that of %s would cast the whole pool of a layer)",
            *(phase, KVPOOL_BACKEND, common),
        )
        declare_resolution(server_args, _SOURCE, **{f"{phase}_attention_backend": KVPOOL_BACKEND})
    if common is None and None in phases:
        if not attention_rules.is_chosen(layout, arrangement, view.device, view.dcp_size):
            logger.info("sgl-kvpool: SGLang chooses the attention backend; its own read %s", layout)
            return  # the last step checks its choice
        declare_resolution(server_args, _SOURCE, attention_backend=KVPOOL_BACKEND)
    attention_rules.check_backends(layout, arrangement, view)
    if view.device == "cpu" and KVPOOL_BACKEND in attention_rules.backends_in_use(view):
        from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, with_phase

        for part in (Phase.DECODE, Phase.PREFILL):  # disabled, as SGLang does for torch_native
            config = with_phase(view.cuda_graph_config, part, backend=Backend.DISABLED)
            declare_resolution(server_args, _SOURCE, cuda_graph_config=config)


def _choose_deterministic_backend(server_args):
    """Before SGLang's step for deterministic servers, which names a backend where none is named."""
    from sglang.srt.arg_groups.overrides import resolving_view

    view = resolving_view(server_args)
    if view.enable_deterministic_inference or view.rl_on_policy_target is not None:
        _choose_backend(server_args)


def _finish(server_args):
    """After SGLang's last step, refuse resolved arguments that contradict the options.

    Also choose host sharing, hook the launcher, and export the schedulers' hook groups.
    """
    layout, arrangement = options.layout_of(server_args), options.arrangement_of(server_args)
    launching.export_hook_groups(server_args, ())
    if layout is None and not env.flag(env.FIX_TOPK):
        return
    from sglang.srt.arg_groups.overrides import model_config_of, resolving_view

    view, model_config = resolving_view(server_args), model_config_of(server_args)
    sparse = is_dsa(model_config)
    if layout is None:
        if sparse:
            hook_groups.require((hook_groups.SPARSE_ATTENTION,))
            dsa_rules.check_stock(model_config, view)
        return
    groups = hook_groups.used_by(view, model_config)
    hook_groups.require(groups)
    argument_rules.check_features(layout, arrangement, view)
    argument_rules.check_page(view)
    argument_rules.check_chunk(view)
    requested = {one: getattr(server_args, one.attribute, None) or one.default for one in options.OPTIONS}
    if not host_tier_rules.has_host_tier(view):
        host_tier_rules.check_without_tier(requested, view)
    else:
        sharing, why = choose_sharing(requested[options.HOST_SHARING], model_config, view)
        setattr(server_args, options.HOST_SHARING.attribute, sharing)
        asked = requested[options.HOST_SHARING]
        setattr(server_args, options.CHOSE_SHARING, asked == options.AUTO)
        if sharing != asked and (asked != options.AUTO or view.tp_size > 1):
            logger.info("sgl-kvpool: %s %s (%s)", options.HOST_SHARING.flag, sharing, why)
        tier = options.host_tier_of(server_args)
        host_tier_rules.check_host_tier(layout, arrangement, tier, view)
        host_tier_rules.check_host_model(layout, arrangement, tier, model_config, view)
    if sparse:
        dsa_rules.check_resolved(layout, model_config, view)
    else:
        dcp_rules.check(layout, model_config, view)  # again: SGLang has set some fields since
        attention_rules.check_backends(layout, arrangement, view)
        attention_rules.check_model(model_config, view)
    models.check_resolved_dtype(layout, view.kv_cache_dtype, is_dsa=sparse)
    hook_groups.apply((hook_groups.LAUNCHER,))
    launching.export_hook_groups(server_args, groups)


#: Step of SGLang's argument resolution -> function that wraps it, in SGLang's order.
STEPS: Mapping[str, Callable] = {
    "handle_deprecated_dp_attention": _step(_decide),
    "handle_model_specific_adjustments": _step(_check_model),
    "handle_deterministic_inference": _step(_choose_deterministic_backend),
    "handle_attention_backend_compatibility": _step(_choose_backend),
    "validate_deepep_v2_dispatch_token_budget": _step(_finish, first=False),
}

uses(f"{_ARG_GROUPS}.resolution_hooks._OVERRIDABLE_HOOKS", "arguments", members=STEPS)
