"""docs/architecture.md: paths and names exist, no directory is missing, the floors are import-linter's."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "sgl_kvpool"
PAGE = (ROOT / "docs" / "architecture.md").read_text()
LINTER = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
#: The path of a directory ends with a slash, the path of a file with one of these suffixes.
FILE = r"[\w.-]+\.(?:py|h|cuh|cu|cpp|md|toml)\b"
PATH = re.compile(rf"(?<![\w./-])((?:[\w.-]+/)+(?:{FILE}|(?!\w))|{FILE})")
#: Identifiers in code spans, with or without dots.
NAME = re.compile(r"`([A-Za-z_]\w*(?:\.\w+)*)`")


def paths(text):
    return sorted(set(PATH.findall(text)))


def floors():
    """Cells of the table of floors, top to bottom: (names in the first one, what they may import)."""
    table = PAGE.split("| floor | holds | may import |\n")[1].split("\n\n")[0]
    rows = [row.strip("|").split("|") for row in table.splitlines()[1:]]
    return [(re.findall(r"`(\w+)(?:/|\.py)`", names), may_import) for names, _, may_import in rows]


def layers():
    """Layers of import-linter's contract, in the form of `floors`, without the package's name."""
    (contract,) = (contract for contract in LINTER if contract["type"] == "layers")
    return [re.split(r" [|:] ", layer.replace("sgl_kvpool.", "")) for layer in contract["layers"]]


def test_paths_are_found():
    text = "`a/b.py` or (`c/`), [d](e.md#part); `/server_info` and SGLang 0.5.23, in `x_y/z.cuh`. `make lint`"
    assert paths(text) == ["a/b.py", "c/", "e.md", "x_y/z.cuh"]
    assert len(paths(PAGE)) > 50


def test_every_path_exists():
    bases = (PACKAGE, ROOT, ROOT / "docs")
    assert [path for path in paths(PAGE) if not any((base / path).exists() for base in bases)] == []


def test_every_directory_is_named():
    folders = {module.parent.relative_to(PACKAGE) for module in PACKAGE.rglob("*.py")}
    wanted = {f"{folder.as_posix()}/" for folder in folders if 1 <= len(folder.parts) <= 2}
    assert len(wanted) > 15
    assert wanted <= set(paths(PAGE))


def test_every_name_is_in_the_code():
    sources = "\n".join(
        path.read_text() for path in (*PACKAGE.rglob("*.py"), *PACKAGE.glob("*/csrc/*")) if path.is_file()
    )
    names = {name for name in NAME.findall(PAGE) if not paths(name)}
    assert len(names) > 40
    words = set(re.findall(r"\w+", sources))
    assert {name for name in names if not words.issuperset(name.split("."))} == set()


def test_floors_are_import_linters():
    assert [sorted(names) for names, _ in floors()] == [sorted(names) for names in layers()]


def test_the_floors_that_import_sglang_are_import_linters():
    (contract,) = (contract for contract in LINTER if contract["type"] == "forbidden")
    assert contract["forbidden_modules"] == ["sglang"]
    without = {name.removeprefix("sgl_kvpool.") for name in contract["source_modules"]}
    assert {name for names, may_import in floors() for name in names if "SGLang" not in may_import} == without
