"""Tables and pictures of the pages have the numbers of their scripts and of committed JSON."""

import pytest

from scripts.figures import draw_rows, tables
from scripts.kit.outputs import updated

TABLES = [(page, name) for page, found in tables.PAGES.items() for name in found]


@pytest.mark.parametrize(
    ("page", "name"),
    [pytest.param(*one, marks=[pytest.mark.slow] * (one[1] == "errors")) for one in TABLES],
    ids=lambda value: getattr(value, "stem", value),
)
def test_the_page_has_the_numbers(page, name):
    if name == "errors":
        pytest.importorskip("sglang")
    text, table = page.read_text(), {name: tables.PAGES[page][name]}
    assert updated(text, table) == text, "run python -m scripts.figures.tables"


def test_every_layout_and_file_is_on_a_page():
    pages = "".join(page.read_text() for page in tables.DOCS.glob("*.md"))
    files = {file.name for file in (tables.DOCS / "benchmarks").iterdir()}
    assert [name for name in files if f"(benchmarks/{name})" not in pages] == []
    assert all(f"| `{layout}` " in tables.cpu_table() for layout in tables.LAYOUTS)


@pytest.mark.parametrize("path", draw_rows.PICTURES, ids=lambda path: path.stem)
def test_the_picture_is_what_the_script_draws(path):
    assert path.read_text() == draw_rows.PICTURES[path](), "run python -m scripts.figures.draw_rows"
