"""The census of `scripts.soak` over a host pool with free, used, leaked and lost pages."""

import pytest
import torch
from host_tier import host_pool
from pools import device_pool

from scripts.soak.in_server import census

PAGE = 4


def slots_of(pages):
    return (torch.tensor(pages)[:, None] * PAGE + torch.arange(PAGE)).flatten()


@pytest.mark.usefixtures("published")
def test_pages_of_the_host_are_counted():
    pool = host_pool(device_pool("fp4", page_size=PAGE))
    taken = pool.alloc(5 * PAGE)
    pages = (taken[::PAGE] // PAGE).tolist()
    pool._lost.set(torch.tensor(pages[1:3]).numpy(), True)  # one of them in the tree, one not
    before = torch.cat([pool.free_slots, *pool.release_slots])
    found = census._host(pool, [(None, slots_of(pages[:2])), (None, None), (None, slots_of(pages[3:4]))])
    assert (found["pages"], found["free"], found["in_tree"]) == (pool.page_num, pool.page_num - 5, 3)
    assert (found["nowhere"], sorted(found["nowhere_pages"])) == (2, sorted([pages[2], pages[4]]))
    assert (found["twice"], found["lost_in_tree"], found["marked_otherwise"]) == (0, 1, 2)
    assert found["available_tokens"] == (pool.page_num - 5) * PAGE
    assert torch.equal(before, torch.cat([pool.free_slots, *pool.release_slots]))
