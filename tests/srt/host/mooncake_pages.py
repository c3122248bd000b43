"""Run by test_index_keys.py, in a pytest with the LD_LIBRARY_PATH of Mooncake's library, beside a store."""

import subprocess
import sys
from pathlib import Path

import pytest
from test_every_model import family
from test_hybrid_stores import fetched, stored
from test_index_keys import KEY_BYTES, PAGE

CHANGE = Path(__file__).parents[2] / "engine" / "change_page.py"


@pytest.mark.parametrize(
    ("kind", "ranks", "ends"),
    [
        # The target's first layer, and the draft's, which has the last keys of the page.
        ("DSA, packed draft", 1, (1, 3)),
        # Rank 1's rows, and its last index keys, of two layers and two ranks.
        ("DSA", 2, (0, 4)),
    ],
)
def test_flipped_bits_in_mooncake_end_prefixes(model_of, failures, kind, ranks, ends):
    """`ends`: behind how many keys of a layer and rank a bit is flipped, in two pages of the last rank."""
    from sglang.srt.mem_cache.utils import get_storage_hash_str

    def server(rank):
        return model_of(
            kind, page_size=PAGE, pages=16, store="-", backend="mooncake", rank=rank, tp_size=ranks,
            dcp_size=ranks,
        )  # fmt: skip

    page = ranks * PAGE
    _, one, whole, other = family(page)
    for rank in range(ranks):
        stored(server(rank), one, whole, other)
    for rank in reversed(range(ranks)):
        again, last = server(rank), rank == ranks - 1
        store = again.controller.storage_backend
        assert fetched(again, whole[:-page]) == 2 * page
        for prompt, number, end in ((one, 2, ends[0]), (other, 1, ends[1])) if last else ():
            key = store._tag_keys(get_storage_hash_str(prompt, None, page_size=page))[number]
            place = again.tier.layer_num * PAGE * 416 + end * KEY_BYTES - 1
            subprocess.run([sys.executable, CHANGE, f"{key}_{store.mla_suffix}_k", str(place)], check=True)
        again.evict()
        again.forget()
        for n, (prompt, found) in enumerate(((whole, 3), (one, 3 - last), (other, 2 - last))):
            assert fetched(again, prompt) == found * page
            assert sum(failures().values()) == failures().get("page_checksum", 0) == (n if last else 2)
