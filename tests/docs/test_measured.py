"""docs/benchmarks.md has the numbers of committed JSON."""

import pytest

from scripts.figures import benchmark_tables, page_tables


@pytest.mark.parametrize("name", benchmark_tables.TABLES)
def test_the_page_has_the_numbers_of_the_json(name):
    page = benchmark_tables.PAGE.read_text()
    table = {name: benchmark_tables.TABLES[name]}
    assert page_tables.updated(page, table) == page, "run python -m scripts.figures.benchmark_tables --write"


def test_every_layout_and_file_is_on_the_page():
    """Each file under docs/benchmarks is linked from a page, or read by a command or a test alone."""
    pages = "".join(page.read_text() for page in benchmark_tables.PAGE.parent.glob("*.md"))
    elsewhere = {"transfer_cpu.json"}
    files = {file.name for file in (benchmark_tables.PAGE.parent / "benchmarks").iterdir()}
    assert {name for name in files if f"(benchmarks/{name})" not in pages} == elsewhere
    assert all(f"| `{layout}` " in benchmark_tables.cpu_table() for layout in benchmark_tables.LAYOUTS)
