"""Prefill context parallelism of sparse attention on two ranks, against the whole batch on one."""

from pathlib import Path

import pytest
import rank_processes
import torch
from context_ranks import CASES, RANKS, SparseKernel, case_of, in_forward

SCRIPT = Path(__file__).with_name("context_ranks.py")


@pytest.fixture(scope="module")
def ranks(fresh, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    return folder, rank_processes.run(fresh, SCRIPT, RANKS, folder, CASES)


@pytest.mark.usefixtures("published")
@pytest.mark.parametrize("name", CASES)
def test_ranks_compute_what_one_computes(ranks, name, monkeypatch):
    from sglang.srt.layers.attention import dsa_backend

    from sgl_kvpool.sglang_plugin import hook_groups

    hook_groups.apply(hook_groups.named("sparse attention"))
    monkeypatch.setattr(dsa_backend, "_compiled_cat", torch.cat)
    SparseKernel(monkeypatch)
    folder, lengths = ranks
    layout, batch, _ = name.split()
    case = case_of(layout, batch)
    with in_forward(case.backend):
        wanted = case.run("EXTEND")
    assert sum(lengths[name]) == len(wanted)
    for rank in range(RANKS):
        found, rows = torch.load(folder / f"{name}-{rank}.pt")
        torch.testing.assert_close(found, wanted[rank::RANKS])
        for stored, buffer in zip(rows, case.pool.kv_buffer, strict=True):
            assert torch.equal(stored, buffer.view(torch.uint8))  # both ranks store all rows
