"""States of linear-attention layers as one group of byte pages, in the order in which the host keeps them.

A page is a state slot: what one prefix has of all layers. SGLang stores it part by part, the ssm states of
all layers, then each convolution's, and so does the host: ::

    [ssm of layer 0, 1, ... | conv_0 of layer 0, 1, ... | conv_1 ...]

Layers of packed drafts follow the target's in each part. Needs SGLang for the pools alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

from sgl_kvpool.memory.canonical import CanonicalGroup, CanonicalKVCaches, LayerReference
from sgl_kvpool.refusal import Refusal
from sgl_kvpool.srt.pool.regions import describe

__all__ = ["STATE_FORMAT_VERSION", "StateView"]

#: Of what `StateView.tag` names: counted up when stored states change in another way than their parts do.
STATE_FORMAT_VERSION = 3
_SSM = "ssm"


def _order(part: str) -> int:
    """Place of a part among those of a layer: ssm, conv_0, conv_1, ..."""
    return 0 if part == _SSM else 1 + int(part.removeprefix("conv_"))


@dataclass(frozen=True)
class StateView:
    """The states of a pool and of the drafts that are packed with it.

    Attributes
    ----------
    caches : CanonicalKVCaches
        One group, "state", its parts in the host's order.
    """

    caches: CanonicalKVCaches

    @classmethod
    def of(cls, pools: Sequence[Any]) -> StateView:
        """View of a target's `MambaPool`, then of drafts'.

        Raises
        ------
        TypeError
            Another kind of pool.
        ValueError
            Parts that are not described, or that a draft has not; drafts with fewer slots.
        """
        tensors: list = []
        layers: list[LayerReference] = []
        counts = []
        for place, pool in enumerate(pools):
            view = describe(pool)
            group = view.group("state")
            extra = sorted({layer.part for layer in group.layers if layer.layer_id is None})
            if extra:
                raise Refusal(
                    f"{type(pool).__name__} keeps {', '.join(extra)} beside the states of its layers, which "
                    "the host tier does not carry; leave out --enable-hierarchical-cache or --kv-cache-layout"
                )
            for layer in group.layers:
                runs = replace(layer.runs, tensor_index=layer.runs.tensor_index + len(tensors))
                name = layer.layer_id if place == 0 else f"draft {place} layer {layer.layer_id}"
                layers.append(replace(layer, layer_id=name, runs=runs))
            tensors += view.tensors
            counts.append(group.num_pages)
        if min(counts) < counts[0]:
            raise ValueError(f"a draft's pool has {min(counts)} state slots, its target's {counts[0]}")
        layers.sort(key=lambda layer: _order(layer.part))  # stable: layers keep their order
        group = CanonicalGroup(name="state", layers=tuple(layers), num_pages=counts[0], page_size_tokens=None)
        return cls(CanonicalKVCaches(tuple(tensors), (group,)))

    @property
    def group(self) -> CanonicalGroup:
        """The one group."""
        return self.caches.group("state")

    @cached_property
    def parts_by_layer(self) -> list[tuple[int, ...]]:
        """For each layer, the target's first, the places of its parts in the group."""
        places: dict = {}
        for place, layer in enumerate(self.group.layers):
            places.setdefault(layer.layer_id, []).append(place)
        return [tuple(found) for found in places.values()]

    @cached_property
    def components(self) -> tuple[tuple[int, int], ...]:
        """Offset and bytes of each part of all layers in a slot, in order: what SGLang calls a component."""
        sizes: dict[str, int] = {}
        for layer in self.group.layers:
            sizes[layer.part] = sizes.get(layer.part, 0) + layer.runs.size_bytes
        offsets = accumulate(sizes.values(), initial=0)
        return tuple(zip(offsets, sizes.values(), strict=False))

    @property
    def largest_part_bytes(self) -> int:
        """Of one state of one layer."""
        return max((layer.runs.size_bytes for layer in self.group.layers), default=0)

    @cached_property
    def tag(self) -> str:
        """Name of the bytes of a slot, equal only where slots are interchangeable."""
        layers = [(str(r.layer_id), r.part, r.content, r.runs.size_bytes) for r in self.group.layers]
        digest = hashlib.blake2b(repr((STATE_FORMAT_VERSION, layers)).encode(), digest_size=8)
        return f"m{digest.hexdigest()}"
