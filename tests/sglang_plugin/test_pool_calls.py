"""scripts/pool_calls.json lists all places in SGLang that read or write a pool."""

import importlib.util
from collections import Counter
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


def test_what_a_new_version_adds_is_noticed(calls, tmp_path):
    for file, text in {
        "models/new.py": "def f(pool, layer):\n    return pool.get_key_buffer(layer), pool.kv_buffer[0]\n",
        "layers/alias.py": "set_kv_buffer(pool, 'set_mla_kv_buffer')  # get_kv_buffer()\n",
        "mem_cache/own.py": "class P:\n    def move_kv_cache(self):\n        self.kv_buffer.clear()\n",
        "hardware_backend/npu/pool.py": "pool.get_key_buffer(0)\n",
        "other.py": "pass\n",
    }.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    found = calls.count(tmp_path)
    assert found == {
        "models/new.py": Counter({"get_key_buffer": 1, ".kv_buffer": 1}),
        "layers/alias.py": Counter({"set_kv_buffer": 1}),
    }
    table = {
        "layers/alias.py": Counter({"set_kv_buffer": 1}),
        "models/new.py": Counter({".kv_buffer": 1, "get_key_buffer": 2}),
        "models/gone.py": Counter({"move_kv_cache": 1}),
    }
    assert calls.differences(found, table) == [
        "models/gone.py: move_kv_cache is used 0 times, and pool_calls.json has 1",
        "models/new.py: get_key_buffer is used 1 times, and pool_calls.json has 2",
    ]
