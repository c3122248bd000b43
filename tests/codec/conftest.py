"""Few threads, fixed random numbers."""

import os

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _few_threads():
    torch.set_num_threads(min(2, os.cpu_count() or 1))


@pytest.fixture(autouse=True)
def _fresh_random_numbers():
    torch.manual_seed(1234)
