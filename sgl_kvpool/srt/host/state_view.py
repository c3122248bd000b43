"""States of linear-attention layers as one group of byte pages, in the host's order.

A page is a state slot with the states of one prefix in all layers. SGLang stores a slot part by part: the ssm
states of all layers, then the states of each convolution. The host uses the same order: ::

    [ssm of layer 0, 1, ... | conv_0 of layer 0, 1, ... | conv_1 ...]

In each part, layers of packed drafts follow the target's.
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

#: Version in `StateView.tag`: increased when stored states change in a way that their parts do not show.
STATE_FORMAT_VERSION = 3
_SSM = "ssm"


def _order(part: str) -> int:
    """Sort key of a part in a slot: ssm, conv_0, conv_1, ..."""
    return 0 if part == _SSM else 1 + int(part.removeprefix("conv_"))


@dataclass(frozen=True)
class StateView:
    """The states of a pool and of the drafts that are packed with it.

    Attributes
    ----------
    caches : CanonicalKVCaches
        One group, "state", with its parts in the host's order.
    """

    caches: CanonicalKVCaches

    @classmethod
    def of(cls, pools: Sequence[Any]) -> StateView:
        """View of a target's `MambaPool` and of those of its drafts.

        Raises
        ------
        TypeError
            If a pool is of another kind.
        ValueError
            If a pool keeps states outside of its layers, or a draft's pool has fewer slots than the target's.
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
        """The view's only group."""
        return self.caches.group("state")

    @cached_property
    def parts_by_layer(self) -> list[tuple[int, ...]]:
        """Indices of each layer's parts in the group; the target's layers come first."""
        places: dict = {}
        for place, layer in enumerate(self.group.layers):
            places.setdefault(layer.layer_id, []).append(place)
        return [tuple(found) for found in places.values()]

    @cached_property
    def components(self) -> tuple[tuple[int, int], ...]:
        """Offset and size in bytes of each part of all layers in a slot: SGLang's components, in order."""
        sizes: dict[str, int] = {}
        for layer in self.group.layers:
            sizes[layer.part] = sizes.get(layer.part, 0) + layer.runs.size_bytes
        offsets = accumulate(sizes.values(), initial=0)
        return tuple(zip(offsets, sizes.values(), strict=False))

    @property
    def largest_part_bytes(self) -> int:
        """Bytes of the largest state of one layer."""
        return max((layer.runs.size_bytes for layer in self.group.layers), default=0)

    @cached_property
    def tag(self) -> str:
        """Tag of the bytes of a slot, equal only for interchangeable slots."""
        layers = [(str(r.layer_id), r.part, r.content, r.runs.size_bytes) for r in self.group.layers]
        digest = hashlib.blake2b(repr((STATE_FORMAT_VERSION, layers)).encode(), digest_size=8)
        return f"m{digest.hexdigest()}"
