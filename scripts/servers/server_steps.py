"""Steps that start servers: every layout and arrangement of every shape, after their peers."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from scripts.kit.environment import Machine
from scripts.kit.records import Measurement, read_lines
from scripts.kit.runner import Step
from scripts.servers.limits import BASELINE
from scripts.servers.request import PARTS, Options, Request
from scripts.servers.shapes import Shape, demo_shape, model_shape, random_shapes

__all__ = ["measurements", "server_steps"]

#: Time limit of a random model's server: 1200 s for its start, and the requests.
_LIMIT_S = 2160.0
_MODEL_LIMIT_S = 4 * 3600.0


def measurements(folder: Path) -> list[Measurement]:
    """Measurements that `serve` has written."""
    return [Measurement.from_json(line) for line in read_lines(folder / "measurements.jsonl")]


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
        # With SGLang's own pool sizes, which shows the memory budget of each layout.
        found += [
            _served(shape, options, layout, prefix="memory", parts=("memory",), peers=peers, capped=False)
            for layout, peers in _beside_stock("memory", shape, options)
        ]
        # Two tensor-parallel ranks, compared with the same layout on one rank.
        found += [
            _served(
                shape, options, layout, prefix="tp2", parts=("accuracy", "memory", "hits"),
                more=("--tp-size", "2"), peers={"tp1": _name("serve", shape, layout)}, needs=("gpus:2",),
            )
            for layout in options.layouts
        ]  # fmt: skip
    return found


def _writing(shape: Shape, options: Options) -> Step:
    assert shape.writer is not None
    code = "import sys; from pathlib import Path; from scripts.servers.shapes import write_checkpoint as w; "
    return Step(
        name=f"model-{shape.name}",
        what=f"write a random checkpoint of {shape.name}'s shape",
        command=(
            *(sys.executable, "-c", f"{code} w(sys.argv[1], sys.argv[2], Path(sys.argv[3]))"),
            *(*shape.writer, shape.written(Path(options.models))),
        ),
        limit_s=600,
        parse=None,
        needs=("gpu", "transformers", "safetensors"),
        expected_s=30,
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
    return [_served(shape, options, *pair, **more) for pair in dict.fromkeys(pairs)]


def _beside_stock(prefix: str, shape: Shape, options: Options) -> list[tuple[str | None, dict[str, str]]]:
    """Stock SGLang and all layouts, each with the peers of its step."""
    stock = {"stock": _name(prefix, shape, None)}
    return [(None, {}), *((layout, stock) for layout in options.layouts)]


def _name(prefix: str, shape: Shape, layout: str | None, arrangement: str = "layer_major") -> str:
    where = "" if arrangement == "layer_major" else f"-{arrangement}"
    return f"{prefix}-{shape.name}-{layout or 'stock'}{where}"


def _served(
    shape: Shape,
    options: Options,
    layout: str | None,
    arrangement: str = "layer_major",
    *,
    prefix: str = "serve",
    parts: Sequence[str] = PARTS,
    capped: bool = True,
    more: Sequence[str] = (),
    peers: dict[str, str] | None = None,
    needs: Sequence[str] = (),
    limit_s: float = _LIMIT_S,
    evict_tokens: int = 0,
) -> Step:
    """The step of one server; of SGLang without a layout if `layout` is None.

    `prefix`: Begins the step's name.
    `capped`: Whether the pool has the shape's `pool_tokens`, and a host tier where the machine can have one.
    `more`, `needs`: Further arguments of the server, and further needs of the machine.
    `peers`: Steps that answers are compared with, by name; None for stock SGLang, `bf16` and `layer_major`.
    `evict_tokens`: Tokens that push prompts out of the pool of a server with a host tier that `more` sizes.
    """
    if peers is None:
        peers = {} if layout is None else {"stock": _name(prefix, shape, None)}
        if layout not in (None, BASELINE) or arrangement != "layer_major":
            peers[BASELINE] = _name(prefix, shape, BASELINE)
        if arrangement != "layer_major" and "layer_major" in _arrangements(shape, options):
            peers["layer_major"] = _name(prefix, shape, layout)
    host_tier = bool(evict_tokens)
    if capped and shape.pool_tokens is not None and _has_host_tier(shape, layout):
        host_tier, evict_tokens = True, shape.pool_tokens + shape.load.hit_tokens
    request = Request(
        model=shape.name,
        layout=layout,
        arguments=[
            *("--model-path", shape.written(Path(options.models))),
            *shape.server_arguments(layout, arrangement, host_tier=host_tier, capped=capped),
            *more,
        ],
        environment=shape.server_environment(layout),
        parts=list(parts),
        peers={name: f"{{steps}}/{step}/answers.json" for name, step in peers.items()},
        load=shape.load,
        wait_s=shape.wait_s * options.time_limit_scale,
        evict_tokens=evict_tokens,
    )
    expected_s = 80 if shape.on_cpu else 100 if prefix == "memory" else 200
    own = shape.needs.get(layout or "stock", ())
    return Step(
        name=_name(prefix, shape, layout, arrangement),
        what=f"{shape.name}: {layout or 'stock SGLang'}, {arrangement}" + ", host tier" * host_tier,
        command=(sys.executable, "-m", "scripts.servers.serve", "{folder}"),
        limit_s=limit_s,
        parse=measurements,
        needs=(
            *(() if shape.on_cpu else ("gpu",)),
            *("sglang", *(("plugin",) if layout is not None else ()), *own, *needs),
        ),
        requires=(f"model-{shape.name}",) if shape.writer else (),
        peers=tuple(peers.values()),
        files={"request.json": request.to_json()},
        expected_s=3000 if shape.name == "model" else expected_s,
    )


def _has_host_tier(shape: Shape, layout: str | None) -> bool:
    """Whether a server has a host tier: on a CPU, only with a layout and if enough memory is free."""
    if not shape.on_cpu:
        return True
    from sgl_kvpool.demo.compare import has_room_for_host_tier

    return layout is not None and has_room_for_host_tier()


def _real(shape: Shape, options: Options) -> list[Step]:
    """Steps of a checkpoint, with a pool as large as SGLang makes it; then host hits."""
    ranks = (f"gpus:{options.tp}",) if options.on_gpu and options.tp > 1 else ()
    found = _all_served(shape, options, needs=ranks, limit_s=_MODEL_LIMIT_S)
    if shape.on_cpu:
        return found
    # A pool that is small enough to be filled, and a host tier whose size is a multiple of the pool's.
    tokens = 8 * shape.load.hit_tokens
    return found + [
        _served(
            shape, options, layout, prefix="host", parts=("hits",), peers=peers, needs=ranks,
            more=("--max-total-tokens", str(tokens)), limit_s=_MODEL_LIMIT_S,
            evict_tokens=tokens + shape.load.hit_tokens,
        )
        for layout, peers in _beside_stock("host", shape, options)
    ]  # fmt: skip
