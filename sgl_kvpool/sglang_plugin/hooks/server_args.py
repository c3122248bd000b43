"""The plugin's arguments on SGLang's command line and in its Engine, and the decisions that follow from them.

They are recorded in an attribute of `ServerArgs` (:mod:`sgl_kvpool.sglang_plugin.options`), and declared
in SGLang's own resolution steps.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from sgl_kvpool import env
from sgl_kvpool.refusal import Refusal, print_without_traceback
from sgl_kvpool.sglang_plugin import hook_groups, options
from sgl_kvpool.sglang_plugin.hooks import launching
from sgl_kvpool.sglang_plugin.registry import around, installs, uses
from sgl_kvpool.sglang_plugin.rules import arguments, attention, dsa, features, host_sharing, host_tier, model
from sgl_kvpool.sglang_plugin.server import Rule, Server
from sgl_kvpool.srt.facts.readers import KVPOOL_BACKEND

_SOURCE = "sgl_kvpool"
_ARGS = "sglang.srt.server_args.ServerArgs"
_ARG_GROUPS = "sglang.srt.arg_groups"

#: Attribute that marks the function which takes our Engine keywords.
_EXTENDED = "_kvpool_extended"
_installed = False

uses(f"{_ARG_GROUPS}.resolution_hooks.register_resolution_hook", "arguments", takes=("name",))
uses(f"{_ARG_GROUPS}.overrides.declare_resolution", "arguments", takes=("server_args", "source"))


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
    options.record(server_args, is_command_line=True)
    with _without_traceback(server_args):
        given = {one: one.parse(getattr(args, one.name, None), f"{one.flag} ") for one in options.OPTIONS}
        options.request(server_args, given)
        arguments.check(server_args)
    return server_args


@contextmanager
def _without_traceback(server_args: Any) -> Iterator[None]:
    """Make a refusal of command-line arguments the last line that the process prints."""
    try:
        yield
    except Refusal as refusal:
        if options.config_of(server_args).is_command_line:
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
    previous = module.Engine.server_args_class

    def build(**kwargs):
        values = {option: kwargs.pop(option.name, None) for option in options.OPTIONS}
        server_args = previous(**kwargs)
        given = {option: option.parse(value, f"{option.name}=") for option, value in values.items()}
        options.request(server_args, given)
        arguments.check(server_args)
        return server_args

    setattr(build, _EXTENDED, True)
    module.Engine.server_args_class = staticmethod(build)


def _decide(server_args):
    """Before SGLang's first step, check the arguments and record what all options request."""
    options.store(server_args, arguments.check(server_args))
    if options.config_of(server_args).layout is not None or env.flag(env.FIX_TOPK):
        hook_groups.require((hook_groups.MODEL_RULES,))


def _finish(server_args):
    """After SGLang's last step, check what it has resolved, and export the schedulers' hook groups."""
    launching.export_hook_groups(server_args, ())
    server = Server(server_args)
    if server.config.layout is not None:
        groups = hook_groups.used_by(server)
        hook_groups.require(groups)
        _apply(RULES_AFTER, server_args)
        hook_groups.apply((hook_groups.LAUNCHER,))
        launching.export_hook_groups(server_args, groups)
    elif env.flag(env.FIX_TOPK) and server.is_dsa:
        hook_groups.require((hook_groups.SPARSE_ATTENTION,))
        dsa.check_stock(server)


def _hook_ranks(server: Server) -> None:
    """Hook SGLang's rules for several ranks, before it applies them."""
    if server.view.dcp_size > 1:
        hook_groups.apply((hook_groups.RANKS,))


@around(f"{_ARG_GROUPS}.model_overrides.deepseek_v2._dsa_dcp_overrides", "arguments of several ranks")
def _dsa_dcp_overrides(original, cfg):
    """With a layout, our rules decide.

    SGLang refuses a host tier, which would take index keys for rows.
    """
    from sglang.srt.arg_groups.model_override_base import record_of

    return original(cfg) if options.config_of(record_of(cfg)).layout is None else {}


@around(f"{_ARG_GROUPS}.hicache_hook.resolve_hicache_dcp_compatibility", "arguments of several ranks")
def _resolve_hicache_dcp_compatibility(original, server_args):
    """Accept drafts, of which a rank's host pages have all rows."""
    server = Server(server_args)
    drafts = server.config.layout is not None and server.view.speculative_algorithm is not None
    if not (drafts and server.view.hicache_host_memory_mode == "cache"):
        original(server_args)


#: Rules in their order, each with the property of the servers that it is for.
_Rules = tuple[tuple[str, Rule], ...]
_ALL = "layout"

#: Before SGLang adjusts arguments to the model.
RULES_BEFORE: _Rules = (
    (_ALL, model.check_model),
    (_ALL, attention.check_dcp),
    (_ALL, model.declare_dtype),
    ("is_dsa", dsa.check_server),
    ("is_dsa", dsa.declare_implementations),
    (_ALL, _hook_ranks),
    ("is_dense", host_tier.declare_page_size),
)
_BACKENDS: _Rules = (
    ("is_dense", attention.check_readers),
    ("is_dense", attention.check_dcp_backends),
    ("is_dense", attention.check_ours),
    ("is_dense", attention.check_speculation),
    ("is_dense", attention.check_draft),
)
#: Before SGLang picks attention backends; it has one for models with sparse attention.
RULES_OF_BACKENDS: _Rules = (
    ("is_dense", attention.check_named),
    ("is_dense", attention.declare_backends),
    *_BACKENDS,
    ("is_dense", attention.disable_cpu_graphs),
)
#: After SGLang's last step.
RULES_AFTER: _Rules = (
    (_ALL, features.check),
    (_ALL, arguments.check_page),
    (_ALL, arguments.check_chunk),
    (_ALL, host_tier.check_without_tier),
    ("has_host_tier", host_sharing.choose),
    ("has_host_tier", host_tier.check_host_tier),
    ("has_our_tier", host_tier.check_host_arguments),
    ("has_our_tier", host_tier.check_states),
    ("has_host_tier", host_tier.check_host_layout),
    ("is_dsa", dsa.check_backends),
    ("is_dsa", dsa.check_implementations),
    ("is_dsa", dsa.check_context_parallelism),
    ("is_dsa", dsa.check_features_of_reader),
    ("is_dsa", dsa.check_copies),
    (_ALL, attention.check_dcp),  # again: SGLang has set some fields since
    *_BACKENDS,
    ("is_dense", attention.check_model),
    (_ALL, model.check_resolved_dtype),
)


def _apply(rules: _Rules, server_args: Any) -> None:
    """Apply rules to a server with a layout. Each sees what those before it have declared or recorded."""
    from sglang.srt.arg_groups.overrides import declare_resolution

    if options.config_of(server_args).layout is None:
        return
    for is_for, rule in rules:
        server = Server(server_args)
        declared = rule(server) if getattr(server, is_for) else None
        if declared:
            declare_resolution(server_args, _SOURCE, **declared)


def _deterministic(server_args: Any) -> None:
    """Before SGLang's step for deterministic servers, which sets a backend where the user names none."""
    view = Server(server_args).view
    if view.enable_deterministic_inference or view.rl_on_policy_target is not None:
        _apply(RULES_OF_BACKENDS, server_args)


def _step(run: Callable[[Any], None], *, first: bool = True) -> Callable:
    """Wrap one step of SGLang's argument resolution: ours before SGLang's step, or after it."""

    def step(server_args, previous):
        if not first:
            previous(server_args)
        with _without_traceback(server_args):
            run(server_args)
        if first:
            previous(server_args)

    return step


#: Step of SGLang's argument resolution -> function that wraps it, in SGLang's order.
STEPS: Mapping[str, Callable] = {
    "handle_deprecated_dp_attention": _step(_decide),
    "handle_model_specific_adjustments": _step(partial(_apply, RULES_BEFORE)),
    "handle_deterministic_inference": _step(_deterministic),
    "handle_attention_backend_compatibility": _step(partial(_apply, RULES_OF_BACKENDS)),
    "validate_deepep_v2_dispatch_token_budget": _step(_finish, first=False),
}

uses(f"{_ARG_GROUPS}.resolution_hooks._OVERRIDABLE_HOOKS", "arguments", members=STEPS)
