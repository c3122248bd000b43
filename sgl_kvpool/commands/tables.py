"""Tables for terminals and for pages."""

from collections.abc import Collection, Iterable, Sequence
from itertools import zip_longest


def aligned(rows: Iterable[Sequence[object]], left: Collection[int] = (0,)) -> list[str]:
    """Lines of a table, heads included; `left` are columns on the left. A row may lack its last cells."""
    columns = list(zip_longest(*(map(str, row) for row in rows), fillvalue=""))
    widths = [max(map(len, column)) for column in columns]
    sides = ["<" if number in left else ">" for number in range(len(columns))]
    return [
        "  ".join(
            f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True)
        ).rstrip()
        for row in zip(*columns, strict=True)
    ]


def markdown(head: Sequence[object], rows: Iterable[Iterable[object]]) -> str:
    """A table of a documentation page."""
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in (head, ["---"] * len(head), *rows))
