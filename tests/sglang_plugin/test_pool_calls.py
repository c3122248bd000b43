"""scripts/pool_calls.json lists all places in SGLang that read or write a pool."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def calls():
    spec = importlib.util.spec_from_file_location("pool_calls", ROOT / "scripts" / "pool_calls.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_every_place_in_this_sglang_is_listed(calls):
    found = calls.count(calls.sources())
    assert len(found) > 60
    assert calls.differences(found, calls.listed()) == []
