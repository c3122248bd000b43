"""Run by test_index_keys.py, in a pytest with the LD_LIBRARY_PATH of Mooncake's library, beside a store."""

import subprocess
import sys
from pathlib import Path

from test_every_model import family
from test_hybrid_stores import fetch, stored
from test_index_keys import KEY_BYTES, PAGE

CHANGE = Path(__file__).parents[2] / "engine" / "change_page.py"


def test_flipped_bits_in_mooncake_end_prefixes(model_of, failures):
    from sglang.srt.mem_cache.utils import get_storage_hash_str

    def server():
        return model_of("DSA, packed draft", page_size=PAGE, pages=16, store="-", backend="mooncake")

    _, one, whole, other = family(PAGE)
    first, again = server(), server()
    stored(first, one, whole, other)
    store = again.controller.storage_backend
    fetch(again, whole[:-PAGE])
    assert again.check(whole[:-PAGE]) == 2 * PAGE
    # In a key of the target's first layer, and of the draft's, which has the last keys of the page.
    for prompt, page, layer in ((one, 2, 0), (other, 1, 2)):
        key = store._tag_keys(get_storage_hash_str(prompt, None, page_size=PAGE))[page]
        place = first.tier.layer_num * PAGE * 416 + layer * KEY_BYTES + 8191
        subprocess.run([sys.executable, CHANGE, f"{key}_{store.mla_suffix}_k", str(place)], check=True)
    again.evict()
    again.forget()
    for n, (prompt, found) in enumerate(((whole, 3 * PAGE), (one, 2 * PAGE), (other, PAGE))):
        fetch(again, prompt)
        assert again.check(prompt) == found
        assert sum(failures().values()) == failures().get("page_checksum", 0) == n
