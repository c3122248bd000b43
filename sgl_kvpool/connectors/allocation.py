"""Allocates cross-layer buffers and recurrent states, and views their bytes. Needs torch only."""

from collections.abc import Mapping, Sequence

import torch

from sgl_kvpool.connectors.cross_layer import CrossLayerGroup, LayerPages, check_chunks, shape_of
from sgl_kvpool.memory.arrangement import KVArrangement
from sgl_kvpool.memory.canonical import (
    CanonicalGroup,
    CanonicalKVCaches,
    LayerReference,
    TensorList,
    byte_pages,
)
from sgl_kvpool.memory.runs import PageRuns
from sgl_kvpool.refusal import whole_number


def allocate_cross_layer(
    sets: Sequence[Sequence[LayerPages]],
    *,
    pages: int,
    arrangement: KVArrangement | str,
    device: torch.device | str,
) -> tuple[CrossLayerGroup, ...]:
    """Allocate the buffers of sets of layers, one buffer per page size, number of heads and backend.

    `sets`: Layers in model order, one set for all layers that share their page indices.
    `pages`: Pages of every buffer, including SGLang's reserved page.
    `arrangement`: Any arrangement but `layer_major`.
    `device`: Device of the buffers; `meta` gives shapes and strides only.
    Returns tuple of CrossLayerGroup: Zeroed buffers, in the order of their first layers. Layers of different
      page sizes, head counts or backends are in different groups; pages are never padded to a common size.
    ValueError: for an empty list of layers, a name used twice, pages of different numbers of tokens, or a
      page that the arrangement cannot split.
    """
    arrangement = KVArrangement(arrangement)
    names = [layer.name for members in sets for layer in members]
    if not names or len(set(names)) != len(names):
        raise ValueError(f"layers {names}: give at least one, and each once")
    pages = whole_number("pages", pages)
    tokens = {layer.page_size_tokens for members in sets for layer in members}
    if len(tokens) != 1:
        raise ValueError(
            f"kernels of these layers see pages of {sorted(tokens)} tokens; a page index has to mean the "
            "same tokens in every buffer: allocate such layers separately"
        )
    buckets: dict[tuple, list[list[LayerPages]]] = {}
    for number, members in enumerate(sets):
        for layer in members:
            check_chunks(arrangement, layer)
            buckets.setdefault(layer.key, [[] for _ in sets])[number].append(layer)
    groups = []
    for per_set in buckets.values():
        positions = max(len(members) for members in per_set)
        first = next(layer for members in per_set for layer in members)
        shape = shape_of(arrangement, first, pages, positions)
        groups.append(
            CrossLayerGroup(
                arrangement=arrangement,
                tensor=torch.zeros(shape, dtype=torch.int8, device=device),
                layers=tuple((*m, *[None] * (positions - len(m))) for m in per_set),
            )
        )
    return tuple(groups)


def allocate_states(
    layers: Mapping[int | str, Mapping[str, int]], *, slots: int, device: torch.device | str
) -> dict[tuple[int | str, str], torch.Tensor]:
    """Allocate one tensor per layer and kind of recurrent state; kernels take these tensors separately.

    `layers`: Bytes of one state, for instance ``{3: {"conv": 18432, "ssm": 262144}}``.
    `slots`: State slots per layer and kind.
    Returns dict of (layer, kind) to Tensor [slots, bytes], int8.
    ValueError: if a number is not a positive integer.
    """
    slots = whole_number("slots", slots)
    return {
        (layer, kind): torch.zeros(
            (slots, whole_number(f"{kind} of layer {layer}", size_bytes)), dtype=torch.int8, device=device
        )
        for layer, kinds in layers.items()
        for kind, size_bytes in kinds.items()
    }


def as_canonical(
    groups: Sequence[CrossLayerGroup],
    names: Sequence[str],
    states: Mapping[tuple[int | str, str], torch.Tensor] | None = None,
) -> CanonicalKVCaches:
    """Byte view of the buffers and states that the allocators returned.

    `groups`: Result of `allocate_cross_layer`.
    `names`: Names of the sets, in the order of the sets.
    `states`: Result of `allocate_states`; becomes a group called "state".
    ValueError: if the number of names differs from that of sets, or groups (or states) were not allocated
      together.
    """
    if {len(group.layers) for group in groups} != {len(names)}:
        raise ValueError(f"{len(names)} names for {[len(group.layers) for group in groups]} sets of layers")
    if len({(group.pages, group.first.page_size_tokens) for group in groups}) != 1:
        raise ValueError(f"groups of {[group.pages for group in groups]} pages were not allocated together")
    tensors = TensorList()
    indices = [tensors.add(group.canonical_tensor()) for group in groups]
    found = [
        CanonicalGroup(
            name=name,
            layers=tuple(
                reference
                for index, group in zip(indices, groups, strict=True)
                for reference in group.references(number, index)
            ),
            num_pages=groups[0].pages,
            page_size_tokens=groups[0].first.page_size_tokens,
        )
        for number, name in enumerate(names)
    ]
    if states:
        found.append(_state_group(states, tensors))
    return CanonicalKVCaches(tuple(tensors.tensors), tuple(found))


def _state_group(states: Mapping[tuple[int | str, str], torch.Tensor], tensors: TensorList) -> CanonicalGroup:
    slots = {len(state) for state in states.values()}
    if len(slots) != 1:
        raise ValueError(f"states of {sorted(slots)} slots were not allocated together")
    references = []
    for (layer, kind), state in states.items():
        view = byte_pages(state, 1, f"{kind} of layer {layer}")
        runs = PageRuns(tensor_index=tensors.add(view), offset_bytes=0, run_bytes=view.shape[1])
        references.append(LayerReference(layer_id=layer, part=kind, runs=runs, content="bytes"))
    return CanonicalGroup(
        name="state", layers=tuple(references), num_pages=slots.pop(), page_size_tokens=None
    )
