"""Steps that start servers: every layout and arrangement of every shape, after their peers."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.kit.environment import Machine
from scripts.kit.runner import Step
from scripts.servers import parsers
from scripts.servers.limits import BASELINE
from scripts.servers.options import Options
from scripts.servers.request import Request
from scripts.servers.shapes import Shape, demo_shape, model_shape, random_shapes

__all__ = ["server_steps"]

_BASE_NEEDS = ("sglang",)
#: Time limit of a random model's server: 1200 s for its start, and the requests.
_LIMIT_S = 2160.0
_MODEL_LIMIT_S = 4 * 3600.0


def server_steps(machine: Machine, options: Options) -> list[Step]:
    """All server steps for the given options.

    ValueError: if --model does not name a checkpoint.
    """
    if options.model is not None:
        shape = model_shape(options.model, options.tp, options.server_arguments, on_cpu=not options.on_gpu)
        return _real(shape, options)
    if not options.on_gpu:
        return _all_served(demo_shape(), options)
    found: list[Step] = []
    for shape in random_shapes(machine):
        found.append(_writing(shape, options))
        found += _all_served(shape, options)
        found += _memory(shape, options)
        found += _two_ranks(shape, options)
    return found


def _writing(shape: Shape, options: Options) -> Step:
    assert shape.writer is not None
    module, name = shape.writer
    code = "import sys; from pathlib import Path; from scripts.servers.shapes import write_checkpoint as w; "
    return Step(
        name=f"model-{shape.name}",
        what=f"write a random checkpoint of {shape.name}'s shape",
        command=(
            *(sys.executable, "-c", f"{code} w(sys.argv[1], sys.argv[2], Path(sys.argv[3]))"),
            *(module, name, shape.written(Path(options.models))),
        ),
        limit_s=600,
        parse=None,
        needs=("transformers", "safetensors"),
    )


def _arrangements(shape: Shape, options: Options) -> Sequence[str]:
    """Requested arrangements that the shape supports; by default only `layer_major` if servers take long."""
    if (shape.on_cpu or shape.name == "model") and not options.arrangements_named:
        return ("layer_major",)
    return [name for name in options.arrangements if name in shape.arrangements]


def _all_served(shape: Shape, options: Options, **more) -> list[Step]:
    """Steps of a shape; stock SGLang and bf16 rows come first, since the others are compared with them."""
    pairs = [(None, "layer_major"), (BASELINE, "layer_major")]
    for arrangement in _arrangements(shape, options):
        pairs += [(layout, arrangement) for layout in options.layouts]
    return [
        _Served(shape, layout, arrangement, **more).step(options)
        for layout, arrangement in dict.fromkeys(pairs)
    ]


def _name(prefix: str, shape: Shape, layout: str | None, arrangement: str = "layer_major") -> str:
    where = "" if arrangement == "layer_major" else f"-{arrangement}"
    return f"{prefix}-{shape.name}-{layout or 'stock'}{where}"


def _answers(step: str) -> str:
    """Path of another step's answers.json."""
    return f"{{steps}}/{step}/answers.json"


@dataclass(frozen=True)
class _Served:
    """One server of a step, and what is done with it.

    `layout`: None for SGLang without a layout.
    `arrangement`, `prefix`: `prefix` begins the step's name.
    `parts`: Names in `scripts.servers.request.PARTS`.
    `capped`: Whether the pool has the shape's `pool_tokens`.
    `host_tier`: None: a host tier if the shape and the machine can have one.
    `more`: Further arguments of the server.
    `peers`: Steps that answers are compared with, by name; None for stock SGLang, `bf16` and `layer_major`.
    `needs`: Needs of the machine in addition to the shape's.
    `evict_tokens`: Tokens that push prompts out of the device pool.
    """

    shape: Shape
    layout: str | None
    arrangement: str = "layer_major"
    prefix: str = "serve"
    parts: Sequence[str] = ("accuracy", "memory", "throughput", "hits")
    capped: bool = True
    host_tier: bool | None = None
    more: Sequence[str] = ()
    peers: dict[str, str] | None = None
    needs: Sequence[str] = ()
    limit_s: float = _LIMIT_S
    evict_tokens: int = 0

    def step(self, options: Options) -> Step:
        """The step that starts this server."""
        shape, layout, arrangement, prefix = self.shape, self.layout, self.arrangement, self.prefix
        host_tier, peers, evict_tokens = self.host_tier, self.peers, self.evict_tokens
        if host_tier is None:
            host_tier = shape.pool_tokens is not None and _has_host_tier(shape, layout)
        if peers is None:
            peers = {} if layout is None else {"stock": _name(prefix, shape, None)}
            if layout not in (None, BASELINE) or arrangement != "layer_major":
                peers[BASELINE] = _name(prefix, shape, BASELINE)
            if arrangement != "layer_major" and "layer_major" in _arrangements(shape, options):
                peers["layer_major"] = _name(prefix, shape, layout)
        if host_tier and shape.pool_tokens is not None:
            evict_tokens = shape.pool_tokens + shape.hit_tokens
        request = Request(
            model=shape.name,
            layout=layout,
            arguments=[
                *("--model-path", shape.written(Path(options.models))),
                *shape.server_arguments(layout, arrangement, host_tier=host_tier, capped=self.capped),
                *self.more,
            ],
            environment={**shape.server_environment(layout), **dict(options.server_environment)},
            parts=list(self.parts),
            peers={name: _answers(step) for name, step in peers.items()},
            prompts=list(shape.prompts),
            vocabulary=list(shape.vocabulary),
            hit_tokens=shape.hit_tokens,
            concurrency=shape.concurrency,
            request_tokens=shape.request_tokens,
            new_tokens=shape.new_tokens,
            wait_s=shape.wait_s * options.time_limit_scale,
            evict_tokens=evict_tokens,
            is_sparse=shape.is_sparse,
            gsm8k_data=options.gsm8k_data,
            gsm8k_questions=options.gsm8k_questions,
            retrieval_characters=list(options.retrieval_characters),
        )
        what = f"{shape.name}: {layout or 'stock SGLang'}, {arrangement}" + (
            ", host tier" if host_tier else ""
        )
        return Step(
            name=_name(prefix, shape, layout, arrangement),
            what=what,
            command=(sys.executable, "-m", "scripts.servers.serve", "{folder}"),
            limit_s=self.limit_s,
            parse=parsers.lines,
            needs=(
                *(() if shape.on_cpu else ("gpu",)),
                *_BASE_NEEDS,
                *(("plugin",) if layout is not None else ()),
                *shape.needs.get(layout or "stock", ()),
                *self.needs,
            ),
            requires=(f"model-{shape.name}",) if shape.writer else (),
            peers=tuple(peers.values()),
            files={"request.json": request.to_json()},
        )


def _has_host_tier(shape: Shape, layout: str | None) -> bool:
    """Whether a server has a host tier: on a CPU, only with a layout and if enough memory is free."""
    if not shape.on_cpu:
        return True
    from sgl_kvpool.demo.compare import has_room_for_host_tier

    return layout is not None and has_room_for_host_tier()


def _memory(shape: Shape, options: Options) -> list[Step]:
    """Steps with SGLang's own pool sizes, which check the memory budget of each layout."""
    stock = _name("memory", shape, None)
    return [
        _Served(
            shape, layout, prefix="memory", parts=("memory",), capped=False, host_tier=False,
            peers={} if layout is None else {"stock": stock},
        ).step(options)
        for layout in (None, *options.layouts)
    ]  # fmt: skip


def _two_ranks(shape: Shape, options: Options) -> list[Step]:
    """Steps with two tensor-parallel ranks, compared with the same layout on one rank."""
    return [
        _Served(
            shape, layout, prefix="tp2", parts=("accuracy", "memory", "hits"), more=("--tp-size", "2"),
            peers={"tp1": _name("serve", shape, layout)}, needs=("gpus:2",),
        ).step(options)
        for layout in options.layouts
    ]  # fmt: skip


def _real(shape: Shape, options: Options) -> list[Step]:
    """Steps of a checkpoint: all parts on one server, because its start takes long; then host hits."""
    parts = ["accuracy", "memory", "throughput", "hits", "gsm8k", "retrieval"]
    ranks = (f"gpus:{options.tp}",) if options.on_gpu and options.tp > 1 else ()
    found = _all_served(shape, options, parts=parts, needs=ranks, limit_s=_MODEL_LIMIT_S)
    if shape.on_cpu:
        return found
    # A pool that is small enough to be filled, and a host tier whose size is a multiple of the pool's.
    tokens = 8 * shape.hit_tokens
    more = ("--max-total-tokens", str(tokens))
    for layout in (None, *options.layouts):
        server = _Served(
            shape, layout, prefix="host", parts=("hits",), host_tier=True, more=more,
            peers={} if layout is None else {"stock": _name("host", shape, None)}, needs=ranks,
            limit_s=_MODEL_LIMIT_S, evict_tokens=tokens + shape.hit_tokens,
        )  # fmt: skip
        found.append(server.step(options))
    return found
