"""Tables for terminals and for pages."""

from collections.abc import Collection, Iterable
from itertools import zip_longest


def aligned(rows: Iterable[Iterable[object]], left: Collection[int] = (0,)) -> list[str]:
    """Lines of a table, heads included; `left` are columns on the left. A row may lack its last cells."""
    columns = []
    for number, cells in enumerate(zip_longest(*(map(str, row) for row in rows), fillvalue="")):
        width, side = max(map(len, cells)), "<" if number in left else ">"
        columns.append([f"{cell:{side}{width}}" for cell in cells])
    return ["  ".join(row).rstrip() for row in zip(*columns, strict=True)]


def markdown(*rows: Iterable[object]) -> str:
    """A table of a documentation page; the first row has the titles."""
    cells = [list(map(str, row)) for row in rows]
    lines = [f"| {' | '.join(row)} |" for row in cells]
    return "\n".join([lines[0], "|---" * len(cells[0]) + "|", *lines[1:]])
