"""Fenced blocks of Markdown pages."""

from collections.abc import Iterator


def blocks(text: str) -> Iterator[tuple[str, str]]:
    """Each fenced block of a page: what stands behind its opening fence, and its text.

    ValueError: the last block is not closed.
    """
    kind, lines = None, []
    for line in text.splitlines():
        if not line.lstrip().startswith("```"):
            if kind is not None:
                lines.append(line)
        elif kind is None:
            kind, lines = line.strip().removeprefix("```"), []
        else:
            yield kind, "\n".join(lines)
            kind = None
    if kind is not None:
        raise ValueError(f"a block of kind {kind!r} is not closed")
