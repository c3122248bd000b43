"""docs/rows.md: offsets, sizes and the reader that it spells out, against the product."""

import re

import numpy as np
import pytest
import torch
from fences import blocks

from scripts import ROOT
from sgl_kvpool.codec import decode_rows, encode_rows
from sgl_kvpool.layout import MLAKVCacheLayout

PAGE = (ROOT / "docs" / "rows.md").read_text()
GEOMETRIES = [(rank, rope) for rank in (128, 256, 384, 512, 1024) for rope in (0, 64)]


def table_after(line):
    """Cells by layout of the table that follows a line of the page."""
    text = PAGE.split(line)[1].lstrip("\n").split("\n\n")[0]
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in text.splitlines()]
    return {row[0].strip("`"): row[1:] for row in rows[2:]}


@pytest.mark.parametrize("layout", MLAKVCacheLayout)
def test_offsets_of_512_and_64(layout):
    rows = table_after("`a..b` are the bytes from a up to, not including, b.\n")
    fmt = layout.row_format(512, 64)
    *segments, row_bytes = rows[layout.value]
    numbers = re.findall(r"(\d+)\.\.(\d+): (\d+)", " | ".join(segments))
    assert [tuple(map(int, found)) for found in numbers] == [
        (s.offset_bytes, s.end_bytes, s.count) for s in fmt.segments
    ]
    assert int(row_bytes) == fmt.row_bytes


@pytest.mark.parametrize("layout", MLAKVCacheLayout)
@pytest.mark.parametrize(("rank", "rope"), GEOMETRIES)
def test_offsets_of_any_geometry(layout, rank, rope):
    rows = table_after("(no part has padding before it; the row ends at the next multiple of 16):\n")
    cells = [re.sub(r"(\d+)([RP])", r"\1*\2", cell) for cell in rows[layout.value]]
    assert all(re.fullmatch(r"[\dRP+*/ ]*", cell) for cell in cells)
    latent, scales, rotary, end = (eval(cell, {"R": rank, "P": rope}) if cell else None for cell in cells)
    fmt = layout.row_format(rank, rope)
    assert (latent, end) == (fmt.nope.offset_bytes, fmt.payload_bytes)
    assert fmt.row_bytes == -(-end // 16) * 16
    assert scales == (fmt.scale.offset_bytes if fmt.scale else None)
    if fmt.rope:
        assert rotary == fmt.rope.offset_bytes


def test_the_reader_reads():
    pytest.importorskip("ml_dtypes")
    (code,) = (text for kind, text in blocks(PAGE) if kind == "python")
    fmt = MLAKVCacheLayout.FP4.row_format(512, 64)
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(5, 576, generator=generator).bfloat16()
    rows = encode_rows(values[:, :512], values[:, 512:], fmt)
    names = {"rows": rows.numpy()}
    exec(code, names)
    assert np.array_equal(names["values"], decode_rows(rows, fmt, torch.float32).numpy())
    assert np.array_equal(names["values"][:, 512:], values[:, 512:].float().numpy())
