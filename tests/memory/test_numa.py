"""NUMA nodes, and the kernel's own record of a mapping's policy."""

import ctypes
import errno
import mmap
import os
import re
from pathlib import Path

import pytest

from sgl_kvpool.memory.numa import interleave, numa_nodes

PAGES = 5


def policies_of(address, size_bytes):
    """NUMA policies in a range, by first address, from /proc/self/numa_maps.

    The kernel splits a mapping where the policy changes, so one policy for all of a mapping is one entry.
    """
    lines = [line.split()[:2] for line in Path("/proc/self/numa_maps").read_text().splitlines()]
    found = {int(begin, 16): policy for begin, policy in lines}
    return {begin: policy for begin, policy in found.items() if 0 <= begin - address < size_bytes}


def interleave_or_skip(address, size_bytes, nodes):
    """Result of `interleave`; skips the test where mbind is forbidden.

    Docker's default seccomp profile refuses mbind with EPERM, whatever its arguments, unless the container
    has CAP_SYS_NICE. The kernel itself gives EPERM only for a flag that `interleave` does not use.
    """
    problem = interleave(address, size_bytes, nodes)
    if problem == os.strerror(errno.EPERM):
        pytest.skip(f"mbind is forbidden here: {problem}")
    return problem


needs_numa = pytest.mark.skipif(
    not Path("/proc/self/numa_maps").exists(), reason="a kernel without NUMA has no mbind"
)


@pytest.mark.parametrize(
    ("text", "nodes"), [("0\n", [0]), ("0-3\n", [0, 1, 2, 3]), ("0,2-3,130\n", [0, 2, 3, 130]), ("\n", [])]
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


@needs_numa
def test_the_kernel_records_the_policy(mapping):
    """For every page, also the last one, of a size that is not a multiple of a page."""
    address, size_bytes = mapping
    assert interleave_or_skip(address, size_bytes - 61, numa_nodes()) is None
    nodes = re.sub(r"\s", "", Path("/sys/devices/system/node/has_memory").read_text())
    assert policies_of(address, size_bytes) == {address: f"interleave:{nodes}"}


@needs_numa
def test_nodes_that_the_machine_lacks(mapping):
    """The result is the kernel's reason in words."""
    assert interleave_or_skip(*mapping, [1000]) == "Invalid argument"
