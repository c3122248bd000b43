#!/usr/bin/env python3
"""Draw a row of every layout to scale, with byte offsets, as `docs/rows.svg`.

    python scripts/draw_rows.py [--write | --check]

All content comes from `sgl_kvpool.layout`, the only dependency; the same sources give the same file.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from sgl_kvpool.layout import MLAKVCacheLayout, RowFormat, Segment  # noqa: E402

PICTURE = ROOT / "docs" / "rows.svg"
RANK, ROPE = 512, 64
#: Pixels: width of the names, of a byte, height of a row's bar, distance of rows, margins.
NAMES, PER_BYTE, BAR, STEP, MARGIN, TOP = 170, 0.6, 44, 96, 16, 46
#: About the width of a small letter.
SMALL = 6.2
#: Fill colour by segment: readable with dark text on any page, distinct for colour-blind readers.
FILLS = {"nope": "#9ecae1", "scale": "#fdae6b", "rope": "#a1d99b"}
WORDS = {"nope": "latent", "scale": "scales", "rope": "rotary"}


def _text(x: float, y: float, text: str, kind: str, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{text}</text>'


def _label(segment: Segment) -> tuple[str, str]:
    """Text in a segment: its meaning, and its values."""
    return WORDS[segment.name], f"{segment.count} x {segment.encoding.value[0]}"


def _row(fmt: RowFormat, top: float, widest: int) -> list[str]:
    """Elements of one row whose bar begins at `top`."""
    middle = top + BAR / 2
    lines = [
        _text(NAMES - 12, middle - 2, fmt.layout.value, "name", "end"),
        _text(NAMES - 12, middle + 15, f"{fmt.row_bytes} bytes", "note", "end"),
    ]
    ends: list[tuple[float, str]] = []
    for segment in fmt.segments:
        x, width = NAMES + segment.offset_bytes * PER_BYTE, segment.size_bytes * PER_BYTE
        place = f'x="{x:.1f}" y="{top:.1f}" width="{width:.1f}" height="{BAR}"'
        lines.append(f'<rect {place} fill="{FILLS[segment.name]}"/>')
        word, values = _label(segment)
        if width > SMALL * len(values) + 6:
            lines.append(_text(x + width / 2, middle - 3, word, "inside"))
            lines.append(_text(x + width / 2, middle + 14, values, "inside small"))
        else:
            # The segment is too narrow for its text, which is drawn above it.
            lines.append(_text(x + width / 2, top - 8, f"{word}: {values}", "note"))
            lines.append(
                f'<line x1="{x + width / 2:.1f}" y1="{top - 4:.1f}" x2="{x + width / 2:.1f}" y2="{top:.1f}"/>'
            )
        ends.append((x, str(segment.offset_bytes)))
    end = NAMES + fmt.row_bytes * PER_BYTE
    ends.append((end, str(fmt.row_bytes)))
    taken = float("-inf")
    for x, offset in ends:
        # If neighbouring numbers would overlap, the later one moves to a second line.
        half = SMALL * len(offset) / 2
        lowered = x - half < taken + 3
        y = top + BAR + (27 if lowered else 14)
        lines.append(_text(x, y, offset, "note"))
        if not lowered:
            taken = x + half
        tick = top + BAR + (16 if lowered else 3)
        lines.append(f'<line x1="{x:.1f}" y1="{top + BAR:.1f}" x2="{x:.1f}" y2="{tick:.1f}"/>')
    fits = widest / fmt.row_bytes
    lines.append(_text(end + 12, middle + 5, f"{fits:.2f} x the tokens of bf16", "note", "start"))
    return lines


def picture() -> str:
    """The SVG, with one row per layout."""
    formats = [layout.row_format(RANK, ROPE) for layout in MLAKVCacheLayout]
    widest = formats[0].row_bytes
    width = NAMES + widest * PER_BYTE + SMALL * len("1.00 x the tokens of bf16") + 12 + MARGIN
    height = TOP + STEP * len(formats) + MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'width="{width:.0f}" height="{height:.0f}" font-family="sans-serif">',
        "<title>A KV row of one token and layer, to scale</title>",
        "<style>text{fill:#222}.name{font-size:15px;font-weight:bold}.note{font-size:12px;fill:#444}"
        ".inside{font-size:14px}.small{font-size:12px}line{stroke:#444;stroke-width:1}"
        "rect{stroke:#444;stroke-width:1}</style>",
        f'<rect width="{width:.0f}" height="{height:.0f}" fill="#ffffff" style="stroke:none"/>',
        _text(
            MARGIN,
            26,
            f"One token of one layer, latent {RANK}, rope {ROPE}; numbers below are byte offsets",
            "note",
            "start",
        ),
    ]
    for index, fmt in enumerate(formats):
        parts += _row(fmt, TOP + 18 + STEP * index, widest)
    return "\n".join([*parts, "</svg>", ""])


def main() -> int:
    """Print, write or compare the picture; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help=f"write {PICTURE.relative_to(ROOT)}")
    parser.add_argument("--check", action="store_true", help="compare the result with the file")
    arguments = parser.parse_args()
    svg = picture()
    if arguments.write:
        PICTURE.write_text(svg)
    elif arguments.check:
        if PICTURE.read_text() != svg:
            print(f"{PICTURE} is out of date; run {Path(__file__).name} --write", file=sys.stderr)
            return 1
    else:
        print(svg, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
