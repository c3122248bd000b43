"""Trees of drafts: what SGLang compiles for EAGLE and MTP, with the kernels' checks."""

from collections.abc import Callable

import torch

from emulated_cuda import launches
from emulated_cuda.model_operators import normed


def _eh_norm(embeds, hidden, e_weight, h_weight, out, eps) -> None:
    """Both inputs of a draft's first projection, side by side."""
    assert {tensor.stride(-1) for tensor in (embeds, hidden, e_weight, h_weight, out)} == {1}
    assert (embeds.is_contiguous(), hidden.is_contiguous()) == (True, True)
    assert (embeds.shape, 2 * embeds.shape[1]) == (hidden.shape, out.shape[1])
    out.copy_(torch.cat([normed(embeds, e_weight, eps), normed(hidden, h_weight, eps)], -1))


def _build_tree(
    parents, selected, lengths, mask, positions, index, next_token, sibling, topk, depth, count, mode
) -> None:  # fmt: skip
    """Positions, links and the mask of `count` drafted tokens per request, of which 0 is the verified one."""
    tensors = [parents, selected, lengths, mask, positions, index, next_token, sibling]
    assert {(x.dtype, x.is_contiguous()) for x in tensors[:3] + tensors[4:]} == {(torch.int64, True)}
    assert mode in (0, 1)  # the mask has columns for a request's tokens before the drafts, or not
    assert positions.numel() == index.numel()

    def build(parents, selected, lengths, mask, positions, index, next_token, sibling):
        bits, begin = mask.view(torch.uint8).view(-1), 0
        for request, length in enumerate(lengths.tolist()):
            chosen = selected[request].tolist()
            sources = parents[request].tolist() if parents.numel() else []
            width = length + count if mode == 0 else count
            rows = bits[begin : begin + width * count].view(count, width)[:, width - count :]
            begin += width * count
            rows[:] = 0
            rows[:, 0] = 1

            def parent_of(place, chosen=chosen, sources=sources):
                block = chosen[place - 1] // topk
                return 0 if block == 0 else chosen.index(sources[block]) + 1

            for place in range(count):
                steps, at = 0, place
                while at:
                    rows[place, at] = 1
                    steps, at = steps + 1, parent_of(at)
                positions[request * count + place] = length + steps
                index[request, place] = request * count + place
            for place in range(count - 1, 0, -1):
                parent = parent_of(place)
                if int(next_token[request, parent]) != -1:
                    sibling[request, place] = next_token[request, parent]
                next_token[request, parent] = place

    launches.launch("build_tree", build, tensors, writes=range(3, 8))


def _verify_greedy(predicts, accepted, counts, candidates, index, next_token, sibling, target) -> None:
    """Follow drafted tokens as long as each is the target's choice; -1 ends a list of links."""
    tensors = [predicts, accepted, counts, candidates, index, next_token, sibling, target]
    assert {(tensor.dtype, tensor.shape) for tensor in tensors[3:]} == {(torch.int64, candidates.shape)}
    assert predicts.dtype == accepted.dtype == counts.dtype == torch.int32
    assert predicts.shape == (candidates.numel(),)

    def verify(predicts, accepted, counts, candidates, index, next_token, sibling, target):
        wanted = target.view(-1)
        for request in range(len(candidates)):
            last, at, found = int(index[request, 0]), 0, 0
            accepted[request, 0] = last
            for _ in range(1, accepted.shape[1]):
                at = int(next_token[request, at])
                while at != -1 and int(candidates[request, at]) != int(wanted[last]):
                    at = int(sibling[request, at])
                if at == -1:
                    break
                predicts[last] = wanted[last]
                found, last = found + 1, int(index[request, at])
                accepted[request, found] = last
            counts[request] = found
            predicts[last] = wanted[last]

    launches.launch("verify_tree", verify, tensors, writes=range(3))


#: Function of a module of `load_jit` -> what is called instead, with tensors of the device.
EXPORTS: dict[str, Callable[..., None]] = {
    "build_tree_kernel_efficient": _build_tree,
    "fused_eh_norm": _eh_norm,
    "verify_tree_greedy": _verify_greedy,
}
