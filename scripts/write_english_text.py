#!/usr/bin/env python3
"""Write the English text that the demo and `scripts.accuracy.llm` score, from this Python's documentation.

    python scripts/write_english_text.py

The text has paragraphs of prose of the language reference in the form of `help()` (`pydoc_data.topics`), then
of the docstrings of the standard library, each once. Python's licence covers them:
sgl_kvpool/demo/byte_mla_python/LICENSE-held-out.txt. The text depends on the version of Python; the committed
text is from Python 3.11.7.
"""

from __future__ import annotations

import ast
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

OUT = Path(__file__).resolve().parent.parent / "sgl_kvpool" / "demo" / "english.txt"
#: Excluded modules: without prose, not Python's own, or missing on some systems.
EXCLUDED = {
    *("test", "tests", "idle_test", "site-packages", "dist-packages", "pydoc_data", "lib2to3", "turtledemo"),
}
#: Characters of 131 windows of 512 SmolLM2 tokens.
CHARACTERS = 305_000
SHORTEST = 160


def docstrings() -> Iterator[str]:
    """Docstrings of the standard library in the order of paths; a module's outer definitions come first."""
    root = Path(sysconfig.get_path("stdlib"))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for path in sorted(root.rglob("*.py")):
        if EXCLUDED.isdisjoint(path.relative_to(root).parts):
            for node in ast.walk(ast.parse(path.read_bytes())):
                if isinstance(node, documented):
                    yield ast.get_docstring(node) or ""


def paragraphs(text: str) -> Iterator[str]:
    """Paragraphs of prose in a text, each on one line: not indented, whole sentences, mostly letters."""
    for block in text.split("\n\n"):
        line = " ".join(block.split())
        indented = all(piece.startswith("    ") for piece in block.splitlines() if piece.strip())
        plain = sum(character.isalpha() or character in " ,." for character in line)
        is_prose = not indented and plain >= 0.93 * len(line) and "::=" not in line and ">>>" not in line
        if is_prose and len(line) >= SHORTEST and re.search(r"[.:)]$", line):
            yield line


def english() -> str:
    """The text, paragraphs separated by empty lines."""
    found: dict[str, None] = {}
    length = 0
    for source in (*topics.values(), *docstrings()):
        for paragraph in paragraphs(source):
            if paragraph not in found and length < CHARACTERS:
                found[paragraph] = None
                length += len(paragraph) + 2
    return "\n\n".join(found) + "\n"


if __name__ == "__main__":
    OUT.write_text(english(), encoding="utf-8")
