"""`scripts/kernel_hashes.py`: which parts of machine code are hashed, and what a comparison prints."""

import json
import subprocess
import sys
from pathlib import Path

import kernel_hashes
import pytest

ROOT = Path(__file__).resolve().parents[2]
#: Two kernels as `nvdisasm -c` prints them: the second differs in names and addresses.
SASS = """\t.target\tsm_90a
//--------------------- .text.first --------------------------
\t.section\t.text.first,"ax",@progbits
        .type           first,@function
.text.first:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
.L_x_1:
        /*0010*/              @!P0 BRA `(.L_x_0) ;
        /*0020*/                   CALL.REL.NOINC `($__internal_0_$divide) ;
        /*0030*/                   BRA `(.L_x_1);
.L_x_0:
        /*0040*/                   EXIT ;
        .weak           $__internal_0_$divide
$__internal_0_$divide:
        /*0050*/                   MUFU.RCP R2, R3 ;
//--------------------- .text.second --------------------------
\t.section\t.text.second,"ax",@progbits
        .type           second,@function
.text.second:
        /*0100*/                   LDC R1, c[0x0][0x28] ;
.L_x_7:
        /*0110*/              @!P0 BRA `(.L_x_5) ;
        /*0120*/                   CALL.REL.NOINC `($__internal_3_$divide) ;
        /*0130*/                   BRA `(.L_x_7);
.L_x_5:
        /*0140*/                   EXIT ;
        .weak           $__internal_3_$divide
$__internal_3_$divide:
        /*0150*/                   MUFU.RCP R2, R3 ;
"""
#: Hashes in the name of an anonymous namespace, for two paths of its source.
PATH_HASHES = [("1b2c3d4e", "73b4f906"), ("00ff00ff", "0123abcd")]


def test_names_and_addresses_are_not_hashed():
    found = kernel_hashes.kernels(SASS)
    assert list(found) == ["first", "second"]
    assert kernel_hashes.normalised(found["second"]).splitlines() == [
        "LDC R1, c[0x0][0x28] ;",
        "label0:",
        "@!P0 BRA `(label1) ;",
        "CALL.REL.NOINC `(label2) ;",
        "BRA `(label0);",
        "label1:",
        "EXIT ;",
        "label2:",
        "MUFU.RCP R2, R3 ;",
    ]
    assert len({kernel_hashes.code_hash(code) for code in found.values()}) == 1


@pytest.mark.parametrize(
    ("old", "new"),
    [("MUFU.RCP R2", "MUFU.RCP R4"), ("BRA `(.L_x_7)", "BRA `(.L_x_5)"), ("c[0x0][0x28]", "c[0x0][0x2c]")],
    ids=["register", "target of a branch", "constant"],
)
def test_everything_else_is_hashed(old, new):
    found = kernel_hashes.kernels(SASS)
    changed = found["second"].replace(old, new)
    assert changed != found["second"]
    assert kernel_hashes.code_hash(changed) != kernel_hashes.code_hash(found["first"])


def test_a_name_does_not_depend_on_the_place_of_its_source():
    names = [f"_ZN43_GLOBAL__N__{a}_10_kernels_cu_{b}8productsILi32EEEvPf" for a, b in PATH_HASHES]
    assert [kernel_hashes.without_path(name) for name in names] == ["_ZN8productsILi32EEEvPf"] * 2
    assert kernel_hashes.without_path("_ZN6kvpool17copy_pagesIhEEv") == "_ZN6kvpool17copy_pagesIhEEv"


def test_differences():
    old = {"same": "1", "changed": "2", "removed": "3"}
    new = {"added": "4", "same": "1", "changed": "5"}
    assert kernel_hashes.differences(old, new) == ["gone: removed", "new: added", "differs: changed"]
    assert kernel_hashes.differences(old, old) == []


@pytest.mark.parametrize(("hashes", "status"), [({"a": "1"}, 0), ({"a": "2"}, 1)], ids=["equal", "changed"])
def test_the_program(tmp_path, monkeypatch, capsys, hashes, status):
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text('{"a": "1"}')
    monkeypatch.setattr(kernel_hashes, "all_hashes", lambda: hashes)
    monkeypatch.setattr(sys, "argv", ["kernel_hashes.py", "--json", str(new), "--compare", str(old)])
    assert kernel_hashes.main() == status
    assert capsys.readouterr().out == ("differs: a\n" if status else "")
    assert json.loads(new.read_text()) == hashes


def test_its_configurations_are_found_without_pytest():
    """The test modules that list the configurations are imported by the script's own path."""
    program = "import kernel_hashes, test_codec_compiled as c, test_decode_compiled; print(len(c.JOBS))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, cwd=ROOT / "scripts"
    )
    assert done.stdout == "10\n", done.stderr[-2000:]
