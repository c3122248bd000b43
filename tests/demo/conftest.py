"""Files that cannot be written, without a disk that is full."""

import contextlib
import resource

import pytest


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
