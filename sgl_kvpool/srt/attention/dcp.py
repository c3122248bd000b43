"""Decode context parallelism: a rank's slots of the prefixes that SGLang gathers for a prefill."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


def take_own_prefixes(forward_batch: ForwardBatch, req_to_token: torch.Tensor, rank: int, ranks: int) -> None:
    """Correct a batch's list of slots that `rank` contributes, if a prefix is not a multiple of `ranks` long.

    SGLang takes every `ranks`-th slot of all prefixes together, and so other ranks' slots of a request behind
    such a prefix. A chunk of a prefill ends at a multiple of the page size of one rank, and with
    `--enable-mixed-chunk` running requests end anywhere.
    """
    lengths = forward_batch.extend_prefix_lens_cpu
    if not any(length % ranks for length in lengths):
        return
    own = [torch.arange(len(range(rank, length, ranks))) * ranks + rank for length in lengths]
    requests = torch.arange(len(own)).repeat_interleave(torch.tensor([len(each) for each in own]))
    host = torch.stack([requests, torch.cat(own)])
    if req_to_token.is_cuda:
        host = host.pin_memory()  # so that the copy does not wait
    request, position = host.to(req_to_token.device, non_blocking=True)
    slots = req_to_token[forward_batch.req_pool_indices[request], position]
    forward_batch.attn_dcp_metadata.dcp_local_prefix_kv_indices = slots // ranks
