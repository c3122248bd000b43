"""Makes `codec_oracle` importable whatever the import mode; few threads, fixed random numbers."""

import os
import sys

import pytest
import torch

sys.path.insert(0, os.path.dirname(__file__))


@pytest.fixture(autouse=True, scope="session")
def _few_threads():
    torch.set_num_threads(min(2, os.cpu_count() or 1))


@pytest.fixture(autouse=True)
def _fresh_random_numbers():
    torch.manual_seed(1234)
