"""Tables of what the code defines, as Markdown; docs/reference.md is its output."""

import inspect
from collections.abc import Callable, Iterable, Iterator

from sgl_kvpool import env
from sgl_kvpool.commands.tables import markdown
from sgl_kvpool.layout import MLAKVCacheLayout
from sgl_kvpool.memory.arrangement import KVArrangement
from sgl_kvpool.metrics import FAILURES, METRICS, UNCACHED, Event
from sgl_kvpool.sglang_plugin.hook_groups import GROUPS
from sgl_kvpool.sglang_plugin.options import OPTIONS
from sgl_kvpool.sglang_plugin.rules import features
from sgl_kvpool.sglang_plugin.rules.attention import UNSHOWN_ALGORITHMS
from sgl_kvpool.srt.facts import readers, topk_transform
from sgl_kvpool.srt.facts.readers import KVPOOL_BACKEND, PHASES
from sgl_kvpool.srt.facts.topk_transform import EXTEND_MODES, KVPOOL_DECODE

_Rows = Iterator[Iterable[object]]
#: Scope, name and text of each entry of a list.
_Entries = Iterator[tuple[str, str, str]]

#: Geometries in the table of layouts: latent values, rotary values, whether the pool is one of DSA.
_GEOMETRIES = ((512, 64, False), (512, 0, False), (256, 0, True))


def _code(*words: object) -> str:
    return ", ".join(f"`{word}`" for word in words)


def _layouts() -> _Rows:
    """Layouts: bytes of a row by latent + rotary values; values of `--kv-cache-dtype`: accepted, and used."""
    names = [f"{rank} + {rope}{', DSA' if is_dsa else ''}" for rank, rope, is_dsa in _GEOMETRIES]
    yield "layout", *names, "`--kv-cache-dtype`", "used", "used, DSA"
    for layout in MLAKVCacheLayout:
        sizes = (layout.pool_row_format(r, p, is_dsa=is_dsa).row_bytes for r, p, is_dsa in _GEOMETRIES)
        seen = (_code(layout.sglang_kv_cache_dtype(is_dsa=is_dsa)) for is_dsa in (False, True))
        yield _code(layout), *sizes, _code(*layout.accepted_kv_cache_dtypes), *seen


def _arguments() -> _Rows:
    """Arguments: flags, keys of `--config` YAML, keywords of Engine, and variables; default first."""
    yield "argument", "variable", "values", "effect"
    for option in OPTIONS:
        yield _code(option.flag), _code(option.env), _code(*option.choices), option.help


def _variables() -> _Rows:
    """Environment variables: besides those of the arguments."""
    yield "variable", "values", "effect"
    for name, effect in env.EFFECTS.items():
        yield _code(name), _code(*env.CHOICES.get(name, ("0", "1"))), effect


def _metrics() -> _Rows:
    """Metrics: at `/metrics`, with `--enable-metrics`."""
    yield "metric", "labels", "meaning"
    for one in METRICS.values():
        yield _code(one.exported_name), _code(*one.labels), one.help


def _failures() -> _Rows:
    """Failures: the server goes on; each has a count in `sgl_kvpool_failures_total`, some a log line."""
    return _events("kind", FAILURES)


def _uncached() -> _Rows:
    """Uncached pages: counted in `sgl_kvpool_uncached_pages_total`; the first of each reason is logged."""
    return _events("reason", UNCACHED)


def _events(key: str, events: dict[str, Event]) -> _Rows:
    yield key, "message", "what to do"
    for kind, event in events.items():
        yield _code(kind), event.message, event.remedy


def _features() -> _Entries:
    """Refused features: a server with these arguments does not start."""
    for group, scope in (
        (features.LAYOUT_FEATURES, "every layout"),
        (features.ARRANGEMENT_FEATURES, "`token_major`, `page_major`"),
        (features.BACKEND_FEATURES, f"`{KVPOOL_BACKEND}`"),
        (features.DRAFT_FEATURES, f"`{KVPOOL_BACKEND}` and speculative decoding"),
        (features.DCP_FEATURES, "`--dcp-size` above 1"),
        (features.DENSE_DCP_FEATURES, "`--dcp-size` above 1 and dense attention"),
        (features.SPARSE_DCP_FEATURES, "`--dcp-size` above 1 and sparse attention"),
        (features.READER_FEATURES, "`fp4`, `fp4_fp8_rope` and sparse attention"),
    ):
        for one in group:
            devices = f" on {', '.join(one.devices)}" if one.devices else ""
            yield f"With {scope}{devices}", f"{_code(one.flag)} {one.values}".strip(), one.reason
    for name, reason in UNSHOWN_ALGORITHMS.items():
        yield f"With `{KVPOOL_BACKEND}`", _code(f"--speculative-algorithm {name}"), reason


def _backends() -> _Rows:
    """Attention backends: of `layer_major` rows; `t`: of `token_major` too. `kvpool_mla` reads all rows."""
    yield "backend", *map(_code, MLAKVCacheLayout)
    for name in readers.readers(MLAKVCacheLayout.BF16):
        strided = readers.can_read(name, MLAKVCacheLayout.BF16, KVArrangement.TOKEN_MAJOR)
        yield _code(name) + " t" * strided, *(_reads(name, layout) for layout in MLAKVCacheLayout)


def _reads(name: str, layout: MLAKVCacheLayout) -> str:
    phases = [phase for phase in PHASES if readers.can_read(name, layout, phase=phase)]
    if len(phases) == len(PHASES):
        return "yes"
    casts = "casts the pool" if any(readers.casts_pool(name, layout, phase) for phase in PHASES) else "no"
    return f"{phases[0]}; else {casts}" if phases else casts


def _sparse() -> _Rows:
    """Sparse attention: implementations that read the rows, and the top-k transform for each mode of a batch.

    Decode, verification and a draft's extend are PAGED. SGLang decides on which GPUs an implementation runs.
    In `--dsa-decode-backend`, `kvpool_mla` is called `flashmla_sparse`.
    """
    yield "layout", "prefill", "decode", EXTEND_MODES[0], ", ".join(EXTEND_MODES[1:])
    for layout in MLAKVCacheLayout:
        left_out = readers.SGLANG_READERS[layout].dsa_copied
        if readers.sglang_dsa_reads(layout):
            left_out |= {KVPOOL_DECODE}
        pairs = [pair for pair in topk_transform.working_pairs(layout) if not left_out.intersection(pair)]
        groups: dict[tuple[str, ...], list[str]] = {}
        for prefill in dict(pairs):
            decodes = [second for first, second in pairs if first == prefill]
            forms = [_form(layout, prefill, decodes[0], mode) for mode in EXTEND_MODES]
            key = _code(*decodes), forms[0], "/".join(dict.fromkeys(forms[1:]))
            groups.setdefault(key, []).append(prefill)
        for rest, prefills in groups.items():
            yield _code(layout), _code(*prefills), *rest


def _form(layout: MLAKVCacheLayout, prefill: str, decode: str, mode: str) -> str:
    try:
        return topk_transform.select_topk_transform(layout, prefill, decode, mode).name
    except topk_transform.UnsupportedCombination:
        return "refused"


def _hooks(*, repairs: bool = False) -> _Entries:
    """Hooks: functions of SGLang that the plugin changes, by hook group; their docstrings say more."""
    for group in GROUPS:
        for target, hook in sorted(group.declared.hooks.items()):
            reported = group.declared.repairs.get(target)
            if bool(reported) is repairs:
                change, _, _ = " ".join((hook.__doc__ or "").split()).partition(". ")
                change = change.removesuffix(".") + (f" ({reported})" if reported else "")
                yield group.name.capitalize(), _code(".".join(target.split(".")[-2:])), change


def _repairs() -> _Entries:
    """Repairs: hooks on what is wrong in SGLang itself, with reports; look at them again in 0.5.24."""
    return _hooks(repairs=True)


def _lists(entries: _Entries) -> str:
    """A list for each scope; names with the same text share an entry."""
    scopes: dict[str, dict[str, list[str]]] = {}
    for scope, name, text in entries:
        scopes.setdefault(scope, {}).setdefault(text, []).append(name)
    return "\n\n".join(
        "\n".join((f"**{scope}**\n", *(f"* {', '.join(names)}: {text}" for text, names in texts.items())))
        for scope, texts in scopes.items()
    )


def _section(function: Callable[[], _Rows | _Entries], found: str) -> list[str]:
    title, _, text = inspect.cleandoc(function.__doc__ or "").partition(": ")
    return [f"## {title}", text[0].upper() + text[1:], found]


def page() -> str:
    """The whole page: tables and lists, each below the title and the text of its function's docstring."""
    parts = ["# Reference", "`python -m scripts.figures.reference` prints this page."]
    for rows in (_layouts, _arguments, _variables, _metrics, _failures, _uncached, _backends, _sparse):
        parts += _section(rows, markdown(*rows()))
    for entries in (_features, _hooks, _repairs):
        parts += _section(entries, _lists(entries()))
    return "\n\n".join(parts)


if __name__ == "__main__":
    print(page())
