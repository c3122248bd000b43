#!/usr/bin/env python3
"""List where SGLang reads and writes KV pools, and compare with pool_calls.json.

    python scripts/pool_calls.py

Prints the places in the installed SGLang and what differs from the list, which says what each place does
with rows of a layout; exits with 1 if they differ. SGLang's sources are parsed, not imported. The getters of
our pools raise TypeError for packed and for page-major rows ("raises"), `get_mla_kv_buffer` decodes, setters
encode with the pool's k_scale, never the layer's, and moves and copies take whole rows.
"""

import ast
import importlib.util
import json
import sys
from collections import Counter
from itertools import groupby
from pathlib import Path

#: Methods of pools that read, write, move or describe rows.
METHODS = frozenset(
    {
        *("get_key_buffer", "get_value_buffer", "get_kv_buffer", "get_mla_kv_buffer", "get_kv_buffer_shape"),
        *("set_kv_buffer", "set_mla_kv_buffer", "get_fused_kv_write_buffers", "move_kv_cache"),
        *("get_cpu_copy", "load_cpu_copy", "get_contiguous_buf_infos"),
    }
)
#: Tensors of a pool. Uses inside mem_cache are ignored, because host pools use the same names.
ATTRIBUTE = "kv_buffer"
#: Ignored folders of sglang/srt: other hardware, and stores, which use host pools.
LEFT_OUT = ("hardware_backend/", "mem_cache/storage/")

LIST = Path(__file__).resolve().with_suffix(".json")


def sources() -> Path:
    """Folder `sglang/srt` of the installed SGLang, which is not imported."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("SGLang is not installed")
    return Path(spec.submodule_search_locations[0]) / "srt"


def count(root: Path) -> Counter[tuple[str, str]]:
    """Calls of `METHODS`, and uses of the tensors outside of mem_cache, by file below `root` and name."""
    found: Counter[tuple[str, str]] = Counter()
    words = (*METHODS, ATTRIBUTE)
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        text = path.read_text()
        if name.startswith(LEFT_OUT) or not any(word in text for word in words):
            continue
        found.update((name, word) for node in ast.walk(ast.parse(text)) if (word := _used(node, name)))
    return found


def _used(node: ast.AST, file: str) -> str | None:
    """The method or tensor that a node of a syntax tree uses, or None."""
    if isinstance(node, ast.Call):
        name = getattr(node.func, "attr", getattr(node.func, "id", None))
        return name if name in METHODS else None
    if isinstance(node, ast.Attribute) and node.attr == ATTRIBUTE and not file.startswith("mem_cache/"):
        return f".{ATTRIBUTE}"
    return None


def listed() -> Counter[tuple[str, str]]:
    """Number of uses by file and name in the list."""
    files = json.loads(LIST.read_text()).items()
    return Counter({(file, name): n for file, entry in files for name, n in entry["calls"].items()})


def differences(found: Counter[tuple[str, str]], table: Counter[tuple[str, str]]) -> list[str]:
    """One line for each file and name whose number of uses differs from the list."""
    return [
        f"{file}: {name} is used {found[file, name]} times, and {LIST.name} has {table[file, name]}"
        for file, name in sorted({*found, *table})
        if found[file, name] != table[file, name]
    ]


def main() -> int:
    found = count(sources())
    for file, calls in groupby(sorted(found), key=lambda use: use[0]):
        print(f"{file}: {', '.join(f'{name} {found[file, name]}' for _, name in calls)}")
    problems = differences(found, listed())
    print("\n".join(problems) or f"{LIST.name} has all calls")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
