"""Computed tables in a documentation page, each between two comments with its name."""

from collections.abc import Callable, Iterable, Mapping, Sequence


def markdown(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table."""
    lines = [f"| {' | '.join(cells)} |" for cells in (titles, *rows)]
    return "\n".join([lines[0], "|---" * len(titles) + "|", *lines[1:]])


def updated(text: str, tables: Mapping[str, Callable[[], str]]) -> str:
    """A page's text with all tables computed anew; ValueError if the page lacks a table."""
    for name, table in tables.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        before, rest = text.split(begin)
        _, after = rest.split(end)
        text = f"{before}{begin}\n{table()}\n\n{end}{after}"
    return text
