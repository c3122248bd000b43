"""docs/rows.svg is what its script draws, and what it draws are the bytes of the rows."""

import xml.etree.ElementTree as ET
from pathlib import Path

import draw_rows
import pytest

ROOT = Path(__file__).resolve().parents[2]

SVG = "{http://www.w3.org/2000/svg}"
#: First bytes of latent, scales and rope, then the bytes of the row, as in docs/rows.md.
OFFSETS = {
    "bf16": [0, 1024, 1152],
    "fp8": [0, 512, 576],
    "fp8_block_scale": [0, 512, 528, 656],
    "fp4": [0, 256, 288, 416],
    "fp4_fp8_rope": [0, 256, 288, 352],
}


def test_the_picture_is_what_the_script_draws():
    assert draw_rows.PICTURE.read_text() == draw_rows.picture(), "run scripts/draw_rows.py --write"


@pytest.mark.parametrize("number", range(len(OFFSETS)))
def test_bars_are_to_scale_and_numbered(number):
    drawing = ET.fromstring(draw_rows.PICTURE.read_text())
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


def test_texts_are_inside_the_picture():
    drawing = ET.fromstring(draw_rows.PICTURE.read_text())
    width, height = float(drawing.get("width")), float(drawing.get("height"))
    letter = 8.5  # wider than a letter of the largest text
    for text in drawing.iter(f"{SVG}text"):
        x, y, extent = float(text.get("x")), float(text.get("y")), letter * len(text.text)
        begin = {"start": x, "middle": x - extent / 2, "end": x - extent}[text.get("text-anchor")]
        assert begin >= 0, text.text
        assert 10 < y < height
        assert x <= width
