"""docs/rows.svg and tokens.svg are what their script draws: bytes of rows, bars to scale, readable texts."""

import itertools
import xml.etree.ElementTree as ET

import pytest
from codec_oracle import LAYOUTS, cuts

from scripts.figures import draw_rows

SVG = "{http://www.w3.org/2000/svg}"
#: First bytes of latent, scales and rope, then the bytes of the row.
OFFSETS = {name: sorted({0, *cuts(name, 512, 64)}) for name in LAYOUTS}


PICTURES = pytest.mark.parametrize("path", draw_rows.PICTURES, ids=lambda path: path.stem)


@PICTURES
def test_the_picture_is_what_the_script_draws(path):
    assert path.read_text() == draw_rows.PICTURES[path](), "run python -m scripts.figures.draw_rows --write"


@pytest.mark.parametrize("number", range(len(OFFSETS)))
def test_bars_are_to_scale_and_numbered(number):
    drawing = ET.fromstring(draw_rows.rows_picture())
    bars = [rect for rect in drawing.iter(f"{SVG}rect") if rect.get("fill") != "#ffffff"]
    tops = sorted({float(bar.get("y")) for bar in bars})
    assert len(tops) == len(OFFSETS)
    name, offsets = list(OFFSETS.items())[number]
    row = [bar for bar in bars if float(bar.get("y")) == tops[number]]
    begins = [float(bar.get("x")) for bar in row]
    left, scale = begins[0], float(row[0].get("width")) / (offsets[1] - offsets[0])
    assert [round((x - left) / scale) for x in begins] == offsets[:-1]
    last = row[-1]
    assert round((begins[-1] + float(last.get("width")) - left) / scale) == offsets[-1]
    height = float(last.get("height"))
    texts = [
        text
        for text in drawing.iter(f"{SVG}text")
        if tops[number] - 20 <= float(text.get("y")) <= tops[number] + height + 30
    ]
    shown = {text.text: float(text.get("x")) for text in texts}
    assert name in shown
    assert f"{offsets[-1]} bytes" in shown
    for offset in offsets:
        assert (shown[str(offset)] - left) / scale == pytest.approx(offset, abs=0.5)


def box(text):
    """Left, top, right and bottom of a text, a little larger than any font draws it."""
    size = {"name": 15, "inside": 14}.get(text.get("class"), 12)
    x, y, extent = float(text.get("x")), float(text.get("y")), 0.56 * size * len(text.text)
    begin = {"start": x, "middle": x - extent / 2, "end": x - extent}[text.get("text-anchor")]
    return begin, y - 0.8 * size, begin + extent, y + 0.25 * size


@PICTURES
def test_texts_are_inside_the_picture_and_apart(path):
    drawing = ET.fromstring(draw_rows.PICTURES[path]())
    boxes = {text: box(text) for text in drawing.iter(f"{SVG}text")}
    for text, (left, top, right, bottom) in boxes.items():
        assert left >= 0, text.text
        assert top >= 0, text.text
        assert right <= float(drawing.get("width")), text.text
        assert bottom <= float(drawing.get("height")), text.text
    overlapping = [
        (one.text, other.text)
        for (one, a), (other, b) in itertools.combinations(boxes.items(), 2)
        if a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
    ]
    assert overlapping == []


def test_bars_of_tokens_are_to_scale():
    drawing = ET.fromstring(draw_rows.tokens_picture())
    _, *bars = (float(bar.get("width")) for bar in drawing.iter(f"{SVG}rect"))
    shown = [text.text for text in drawing.iter(f"{SVG}text")]
    tokens = [int(text.split()[0].replace(",", "")) for text in shown if text.endswith(" x)")]
    assert [width / bars[0] for width in bars] == pytest.approx([n / tokens[0] for n in tokens], rel=1e-3)
