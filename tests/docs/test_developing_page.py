"""docs/developing.md: paths and names exist, the floors are import-linter's."""

import re
import tomllib

from scripts import ROOT

PACKAGE = ROOT / "sgl_kvpool"
PAGE = (ROOT / "docs" / "developing.md").read_text()
LINTER = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
#: The path of a directory ends with a slash, the path of a file with one of these suffixes.
FILE = r"[\w.-]+\.(?:py|h|cuh|cu|cpp|md|toml)\b"
PATH = re.compile(rf"(?<![\w./-])((?:[\w.-]+/)+(?:{FILE}|(?!\w))|{FILE})")
#: Identifiers in code spans, with or without dots.
NAME = re.compile(r"`([A-Za-z_]\w*(?:\.\w+)*)`")

#: A definition or an assignment of a name, or a string of its own; and names that are not ours, or endings.
DEFINED = r"^\s*(?:def|class) {0}\b|^\s*{0}(?:, \w+)*\s*[:=]|[\"']{0}[\"']"
OF_OTHERS = {"HiCacheController", "async", "txt", "jsonl"}


def paths(text):
    return sorted(set(PATH.findall(text)))


def floors():
    """Cells of the table of floors, top to bottom: (names in the first one, what they may import)."""
    table = PAGE.split("| floor | holds | may import |\n")[1].split("\n\n")[0]
    rows = [row.strip("|").split("|") for row in table.splitlines()[1:]]
    return [(re.findall(r"`(\w+)(?:/|\.py)`", names), may_import) for names, _, may_import in rows]


def layers():
    """Layers of import-linter's contract, in the form of `floors`, without the package's name."""
    (contract,) = (contract for contract in LINTER if contract["name"] == "Imports go down")
    return [re.split(r" [|:] ", layer.replace("sgl_kvpool.", "")) for layer in contract["layers"]]


def test_every_path_exists():
    bases = (PACKAGE, ROOT, ROOT / "docs", *(ROOT / "tests" / name for name in ("ptxrun", "emulated_cuda")))
    found = [path for path in paths(PAGE) if not path.startswith("/")]
    assert [path for path in found if not any((base / path).exists() for base in bases)] == []


def test_every_program_that_a_page_runs_is_a_module():
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    named = {name for page in pages for name in re.findall(r"python -m (scripts[\w.]*)", page.read_text())}
    assert len(named) > 5
    paths_of = {name: ROOT / name.replace(".", "/") for name in named}
    files = {name: (path.with_suffix(".py"), path / "__main__.py") for name, path in paths_of.items()}
    assert [name for name, both in files.items() if not any(file.exists() for file in both)] == []


def test_every_name_is_defined_in_the_code():
    folders = (PACKAGE, ROOT / "scripts", ROOT / "tests")
    sources = [path.read_text() for folder in folders for path in folder.rglob("*.py")]
    names = {name for name in NAME.findall(PAGE) if not paths(name)}
    assert len(names) > 40
    defined = "\n".join(sources)
    last = {name.rpartition(".")[2] for name in names}
    missing = {name for name in last if not re.search(DEFINED.format(name), defined, re.M)}
    assert missing - OF_OTHERS == set()


def test_floors_are_import_linters():
    assert [sorted(names) for names, _ in floors()] == [sorted(names) for names in layers()]
    modules = [*PACKAGE.glob("*.py"), *(path.parent for path in PACKAGE.glob("*/__init__.py"))]
    there = {path.stem for path in modules}
    assert there - {name for names in layers() for name in names} == {"__init__", "__main__", "version"}


def test_the_floors_that_import_sglang_are_import_linters():
    (contract,) = (contract for contract in LINTER if contract["name"].endswith("without SGLang"))
    assert contract["forbidden_modules"] == ["sglang"]
    names = {name.removeprefix("sgl_kvpool.") for name in contract["source_modules"]}
    without = {name for name in names if "." not in name}  # of `connectors/`, only `pools.py` imports SGLang
    assert {name for names, may_import in floors() for name in names if "SGLang" not in may_import} == without
