"""Steps that start servers: every layout and arrangement of every shape, after their peers."""

import sys
from collections.abc import Sequence
from pathlib import Path

from scripts.kit.environment import Machine
from scripts.kit.records import Measurement, read_lines
from scripts.kit.runner import Step
from scripts.servers.limits import BASELINE
from scripts.servers.request import PARTS, Options, Request
from scripts.servers.shapes import Shape, demo_shape, random_shapes

#: Time limit of a random model's server: 1200 s for its start, and the requests.
_LIMIT_S = 2160.0


def measurements(folder: Path) -> list[Measurement]:
    return [Measurement.from_json(line) for line in read_lines(folder / "measurements.jsonl")]


def server_steps(machine: Machine, options: Options) -> list[Step]:
    """All server steps for the given options."""
    if not options.on_gpu:
        return _all_served(demo_shape(), options)
    found: list[Step] = []
    for shape in random_shapes(machine):
        found.append(_writing(shape, options))
        found += _all_served(shape, options)
        # With SGLang's own pool sizes, which shows the memory budget of each layout.
        found += [
            _served(shape, options, layout, prefix="memory", parts=("memory",), peers=peers, capped=False)
            for layout, peers in (
                (None, {}),
                *((layout, {"stock": _name("memory", shape, None)}) for layout in options.layouts),
            )
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


def _all_served(shape: Shape, options: Options) -> list[Step]:
    """Steps of a shape; stock SGLang and bf16 rows come first, since the others are compared with them."""
    pairs = [(None, "layer_major"), (BASELINE, "layer_major")]
    for arrangement in shape.arrangements:
        pairs += [(layout, arrangement) for layout in options.layouts]
    return [_served(shape, options, *pair) for pair in dict.fromkeys(pairs)]


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
) -> Step:
    """The step of one server; of SGLang without a layout if `layout` is None.

    `prefix`: Begins the step's name.
    `capped`: Whether the pool has the shape's `pool_tokens`, and a host tier where the machine can have one.
    `more`, `needs`: Further arguments of the server, and further needs of the machine.
    `peers`: Steps that answers are compared with, by name; None for stock SGLang, `bf16` and `layer_major`.
    """
    if peers is None:
        peers = {} if layout is None else {"stock": _name(prefix, shape, None)}
        if layout not in (None, BASELINE) or arrangement != "layer_major":
            peers[BASELINE] = _name(prefix, shape, BASELINE)
        if arrangement != "layer_major":
            peers["layer_major"] = _name(prefix, shape, layout)
    host_tier = capped and _has_host_tier(shape, layout)
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
        evict_tokens=shape.pool_tokens + shape.load.hit_tokens if host_tier else 0,
    )
    own = shape.needs.get(layout or "stock", ())
    return Step(
        name=_name(prefix, shape, layout, arrangement),
        what=f"{shape.name}: {layout or 'stock SGLang'}, {arrangement}" + ", host tier" * host_tier,
        command=(sys.executable, "-m", "scripts.servers.serve", "{folder}"),
        limit_s=_LIMIT_S,
        parse=measurements,
        needs=(
            *(() if shape.on_cpu else ("gpu",)),
            *("sglang", *(("plugin",) if layout is not None else ()), *own, *needs),
        ),
        requires=(f"model-{shape.name}",) if shape.writer else (),
        peers=tuple(peers.values()),
        files={"request.json": request.to_json()},
        expected_s=80 if shape.on_cpu else 100 if prefix == "memory" else 200,
    )


def _has_host_tier(shape: Shape, layout: str | None) -> bool:
    """Whether a server has a host tier: on a CPU, only with a layout and if enough memory is free."""
    if not shape.on_cpu:
        return True
    from sgl_kvpool.demo.compare import has_room_for_host_tier

    return layout is not None and has_room_for_host_tier()
