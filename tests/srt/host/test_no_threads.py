"""A process that can start no more threads (pids limit of a container): its store still works."""

import threading

import pytest
import rank_processes
import torch
from direct_stores import MemoryStore, filled, get, put
from model_kinds import KINDS, pool_of, publish_server
from refused_calls import THREADS, refuse
from test_hybrid_stores import fetched, files, stored
from test_hybrid_tree import prompt
from tree_model import build

#: Pages of 320 KB: several threads compute their checksums, and torch's would copy them.
PAGE_SIZE, PAGES = 256, 7


class Rank(rank_processes.Rank):
    def __init__(self, rank, folder):
        super().__init__(rank, folder, 1)

    def model(self, store):
        args = publish_server(self.patch, page_size=PAGE_SIZE, store=store, hicache_ratio=1.0)
        pool = pool_of(KINDS["dense"], "fp4", PAGE_SIZE, PAGES)
        return build(args, {"tp_cache_group": self.all}, pool)

    def result_of(self, case):
        torch.set_num_threads(4)
        torch.ones(1 << 20).sum()  # starts the threads of this one, as a server's first batch does
        store, tokens = self.folder / "store", prompt(3 * PAGE_SIZE)
        first, again = self.model(store), self.model(store)
        refuse(*THREADS)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            threading.Thread(target=print).start()
        stored(first, tokens)
        found = {"files": len(files(store, False)), "length": fetched(again, tokens)}
        again.controller.detach_storage_backend()
        filled(again.tier)  # for a store without copies
        again.controller.storage_backend = MemoryStore(again.tier)
        return {**found, "put": put(again.controller), "hits": get(again.controller)[0]}


def test_pages_are_stored_and_found(fresh, tmp_path):
    (found,) = rank_processes.run(fresh, "test_no_threads.py", 1, tmp_path, ["store"])["store"]
    assert found == {"files": 3, "length": 3 * PAGE_SIZE, "put": True, "hits": 4, "failures": {}}


if __name__ == "__main__":
    rank_processes.go_through(Rank, ["store"])
