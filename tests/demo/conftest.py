"""A result of the demo, and files that cannot be written, without a disk that is full."""

import contextlib
import resource

import pytest

from sgl_kvpool.demo import report
from sgl_kvpool.demo.measure import Greedy


@pytest.fixture
def bf16():
    """Result of a server."""
    return report.Result(
        layout="bf16",
        row_bytes=1152,
        pool_bytes=56623104,
        tokens=16384,
        attention_backend="kvpool_mla",
        start_seconds=40.0,
        scoring_seconds=9.0,
        perplexity=3.0,
        difference=None,
        greedy=[Greedy([9, 8], 0.5), Greedy([1], 0.25)],
    )


@pytest.fixture
def files_of_at_most():
    """`with files_of_at_most(size_bytes)`: longer files give OSError, as on a full disk."""

    @contextlib.contextmanager
    def limited(size_bytes):
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    return limited
