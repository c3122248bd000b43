#!/usr/bin/env python3
"""Draw `docs/rows.svg`, a row of every layout to scale, and `docs/tokens.svg`, the tokens of README's table.

    python -m scripts.figures.draw_rows

Rows come from `sgl_kvpool.layout`, the only dependency; tests compare README's table with `sgl-kvpool plan`.
"""

import re

from scripts import ROOT
from sgl_kvpool.layout import MLAKVCacheLayout, RowFormat, Segment

README = ROOT / "README.md"
RANK, ROPE = 512, 64
#: Pixels: width of the names, of a byte, height of a row's bar, distance of rows, margins.
NAMES, PER_BYTE, BAR, STEP, MARGIN, TOP = 170, 0.6, 44, 96, 16, 46
#: Pixels of the picture of tokens: width of the names, of the longest bar, height of a bar, distance of bars.
SERVERS, LONGEST, TOKEN_BAR, TOKEN_STEP = 216, 460, 22, 32
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
    # Segments that are too narrow for their text, which is drawn above them. At most two: their texts part.
    narrow = [one for one in fmt.segments if one.size_bytes * PER_BYTE <= SMALL * len(_label(one)[1]) + 6]
    anchors = ["middle"] if len(narrow) == 1 else ["end", "start"]
    for segment in fmt.segments:
        x, width = NAMES + segment.offset_bytes * PER_BYTE, segment.size_bytes * PER_BYTE
        place = f'x="{x:.1f}" y="{top:.1f}" width="{width:.1f}" height="{BAR}"'
        lines.append(f'<rect {place} fill="{FILLS[segment.name]}"/>')
        word, values = _label(segment)
        if segment not in narrow:
            lines.append(_text(x + width / 2, middle - 3, word, "inside"))
            lines.append(_text(x + width / 2, middle + 14, values, "inside small"))
        else:
            anchor = anchors[narrow.index(segment)]
            lines.append(_text(x + width / 2, top - 8, f"{word}: {values}", "note", anchor))
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


def rows_picture() -> str:
    formats = [layout.row_format(RANK, ROPE) for layout in MLAKVCacheLayout]
    widest = formats[0].row_bytes
    width = NAMES + widest * PER_BYTE + SMALL * len("1.00 x the tokens of bf16") + 12 + MARGIN
    height = TOP + STEP * len(formats) + MARGIN
    lines = [line for n, fmt in enumerate(formats) for line in _row(fmt, TOP + 18 + STEP * n, widest)]
    head = f"One token of one layer, latent {RANK}, rope {ROPE}; numbers below are byte offsets"
    return _svg(width, height, "A KV row of one token and layer, to scale", head, lines)


def tokens_picture() -> str:
    """The SVG, with one bar per line of README's table of layouts."""
    table = re.findall(r"^\| ([^|]+) \| \d+ \| (\d+) \|", README.read_text(), re.MULTILINE)
    servers = [(name.replace("`", ""), int(tokens)) for name, tokens in table]
    base, most = servers[0][1], max(tokens for _, tokens in servers)
    lines = []
    for number, (name, tokens) in enumerate(servers):
        top, width = TOP + TOKEN_STEP * number, LONGEST * tokens / most
        baseline = top + TOKEN_BAR - 6
        fill = "#bdbdbd" if name.startswith("SGLang") else FILLS["nope"]
        lines += [
            _text(SERVERS - 12, baseline, name, "inside", "end"),
            f'<rect x="{SERVERS}" y="{top}" width="{width:.1f}" height="{TOKEN_BAR}" fill="{fill}"/>',
            _text(SERVERS + width + 10, baseline, f"{tokens:,}  ({tokens / base:.2f} x)", "note", "start"),
        ]
    width = SERVERS + LONGEST + 10 + SMALL * len("2,070,270  (3.27 x)") + MARGIN
    height = TOP + TOKEN_STEP * len(servers) + MARGIN
    head = "Tokens of DeepSeek-V3 that fit on eight H200; grey: SGLang without sgl-kvpool"
    return _svg(width, height, "Tokens that fit, per layout", head, lines)


def _svg(width: float, height: float, title: str, head: str, lines: list[str]) -> str:
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'width="{width:.0f}" height="{height:.0f}" font-family="sans-serif">',
        f"<title>{title}</title>",
        "<style>text{fill:#222}.name{font-size:15px;font-weight:bold}.note{font-size:12px;fill:#444}"
        ".inside{font-size:14px}.small{font-size:12px}line{stroke:#444;stroke-width:1}"
        "rect{stroke:#444;stroke-width:1}</style>",
        f'<rect width="{width:.0f}" height="{height:.0f}" fill="#ffffff" style="stroke:none"/>',
        _text(MARGIN, 26, head, "note", "start"),
    ]
    return "\n".join([*parts, *lines, "</svg>", ""])


#: What draws each file.
PICTURES = {ROOT / "docs" / "rows.svg": rows_picture, ROOT / "docs" / "tokens.svg": tokens_picture}


if __name__ == "__main__":
    for path, draw in PICTURES.items():
        path.write_text(draw())
