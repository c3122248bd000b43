"""Messages that the pages quote exist in the source.

A block whose fence says `message` holds one message, with `...` for what differs from case to case. Every
piece between these has to stand in one string of the package, in order. Flags, variables and the backend's
name, which the source has as constants, are read as a user reads them.
"""

import ast
import re

import pytest
from fences import blocks

from scripts import ROOT
from sgl_kvpool import env
from sgl_kvpool.metrics import FAILURES, UNCACHED
from sgl_kvpool.sglang_plugin import options as record
from sgl_kvpool.srt.facts.readers import DSA_BACKEND, KVPOOL_BACKEND

PAGES = sorted((ROOT / "docs").glob("*.md"))
#: Placeholder for a value in a string of the source; no text contains this character.
VALUE = "\0"
OPTIONS = ("LAYOUT", "ARRANGEMENT", "HOST_LAYOUT", "HOST_ENGINE")
#: Expressions in f-strings that are the same in every message.
NAMES = {
    "KVPOOL_BACKEND": KVPOOL_BACKEND,
    "DSA_BACKEND": DSA_BACKEND,
    **{f"env.{name}": value for name, value in vars(env).items() if isinstance(value, str)},
    **{f"{name}.flag": getattr(record, name).flag for name in OPTIONS},
}
#: Fewest letters that a quotation has to have in common with the source.
LEAST = 25


def strings(tree):
    """Texts of all strings of a module, joined where they are added, with VALUE for each value."""

    def text_of(node):
        match node:
            case ast.Constant(value=str(text)):
                return text
            case ast.FormattedValue(value=value):
                return NAMES.get(ast.unparse(value), VALUE)
            case ast.JoinedStr(values=values):
                return "".join(text_of(value) or VALUE for value in values)
            case ast.BinOp(op=ast.Add(), left=left, right=right):
                left, right = text_of(left), text_of(right)
                return None if left is None and right is None else (left or VALUE) + (right or VALUE)
        return None

    for node in ast.walk(tree):
        text = text_of(node)
        if text is not None:
            yield re.sub(r"%(\.\d)?[sdf]", VALUE, " ".join(text.split()))


@pytest.fixture(scope="module")
def texts():
    files = (ROOT / "sgl_kvpool").rglob("*.py")
    return {text for file in files for text in strings(ast.parse(file.read_text()))}


def pieces_of(quotation):
    return [piece.strip() for piece in " ".join(quotation.split()).split("...") if piece.strip(" ,.;:()'`")]


def is_quoted_from(quotation, text):
    """Whether all pieces of a quotation stand in a text, in order and whole between its values."""
    at = 0
    for piece in pieces_of(quotation):
        found = text.find(piece, at)
        if found < 0:
            return False
        at = found + len(piece)
    return True


FENCED = [(page.name, *block) for page in PAGES for block in blocks(page.read_text())]
QUOTATIONS = [(page, text) for page, kind, text in FENCED if kind == "message"]


@pytest.mark.parametrize(("page", "quotation"), QUOTATIONS, ids=[f"{q[0]}-{q[1][:50]}" for q in QUOTATIONS])
def test_quoted_messages_are_in_the_source(page, quotation, texts):
    assert sum(len(piece) for piece in pieces_of(quotation)) >= LEAST, "quote more of it"
    variants = [quotation, quotation.removeprefix("sgl-kvpool: ")]  # the log's prefix of failures
    assert any(is_quoted_from(variant, text) for variant in variants for text in texts), quotation


def test_a_kind_stands_in_one_table():
    assert not FAILURES.keys() & UNCACHED.keys()


def test_links_between_pages_lead_somewhere():
    """Files and headings that a page links to exist."""
    for page in [*PAGES, ROOT / "README.md"]:
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            if target.startswith(("http://", "https://")):
                continue
            name, _, heading = target.partition("#")
            file = (page.parent / name).resolve() if name else page
            assert file.exists(), f"{page.name}: {target}"
            if heading:
                titles = re.findall(r"^#+ (.+)$", file.read_text(), re.MULTILINE)
                slugs = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
                assert heading in slugs, f"{page.name}: {target}"


def test_no_page_says_something_twice():
    """A merge that kept both sides would leave equal lines."""
    for page in [*PAGES, ROOT / "README.md"]:
        lines = [line for line in page.read_text().splitlines() if line.startswith("## ") or len(line) > 100]
        assert len(lines) == len(set(lines)), page.name
