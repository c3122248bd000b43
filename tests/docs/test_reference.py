"""docs/reference.md is what `scripts.figures.reference` prints, with every argument, metric and event."""

from scripts import ROOT
from scripts.figures.reference import page
from sgl_kvpool.sglang_plugin.hook_points import TESTED

PAGE = ROOT / "docs" / "reference.md"


def test_the_page_is_what_the_program_prints():
    assert f"{page()}\n" == PAGE.read_text(), "python -m scripts.figures.reference > docs/reference.md"
    assert f"look at them again in {TESTED.rpartition('<')[2]}." in PAGE.read_text()
