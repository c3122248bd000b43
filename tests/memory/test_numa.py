"""NUMA nodes, and the kernel's own record of a mapping's policy."""

import ctypes
import mmap
import re
from pathlib import Path

import pytest

from sgl_kvpool.memory.numa import interleave, numa_nodes

PAGES = 5


def policy_of(address):
    """NUMA policy of the mapping at an address, from /proc/self/numa_maps, or None."""
    for line in Path("/proc/self/numa_maps").read_text().splitlines():
        begin, policy = line.split()[:2]
        if int(begin, 16) == address:
            return policy
    return None


@pytest.mark.parametrize(
    ("text", "nodes"),
    [("0\n", [0]), ("0-3\n", [0, 1, 2, 3]), ("0,2-3,130\n", [0, 2, 3, 130]), ("\n", [])],
)
def test_nodes_with_memory(tmp_path, text, nodes):
    (tmp_path / "has_memory").write_text(text)
    assert numa_nodes(tmp_path) == nodes


def test_a_system_that_lists_no_nodes(tmp_path):
    assert numa_nodes(tmp_path) == []


@pytest.fixture
def mapping():
    """Address of a mapping without a page in memory, and its size."""
    with mmap.mmap(-1, PAGES * mmap.PAGESIZE) as memory:
        view = (ctypes.c_char * len(memory)).from_buffer(memory)
        yield ctypes.addressof(view), len(memory)
        del view


@pytest.mark.skipif(not Path("/proc/self/numa_maps").exists(), reason="a kernel without NUMA")
def test_the_kernel_records_the_policy(mapping):
    """For a size that is not a multiple of a page."""
    address, size_bytes = mapping
    problem = interleave(address, size_bytes - 61, numa_nodes())
    if problem is not None:
        pytest.skip(f"mbind: {problem}")
    assert policy_of(address) == "interleave:" + re.sub(r"\s", "", Path(
        "/sys/devices/system/node/has_memory").read_text())  # fmt: skip


def test_nodes_that_the_machine_lacks(mapping):
    """The result is the kernel's reason in words."""
    assert interleave(*mapping, [1000]) == "Invalid argument"
