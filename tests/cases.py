"""Parameters of tests, and a copy of pages."""

import numpy as np


def crossed(*lists):
    """Cases with each value of each list, as many as the longest has: for code that decides by one value."""
    return [tuple(values[i % len(values)] for values in lists) for i in range(max(map(len, lists)))]


def copy_pages(source, target, group, source_pages, target_pages):
    """Copy pages of a group between two byte views with the torch engine."""
    from sgl_kvpool.transfer.cpu_engine import TorchEngine
    from sgl_kvpool.transfer.plan import TransferPlan
    from sgl_kvpool.transfer.slots import Transfer

    transfer = Transfer(np.array(target_pages), np.array(source_pages), to_host=True)
    TorchEngine(TransferPlan(source, target, group)).copy(transfer)
