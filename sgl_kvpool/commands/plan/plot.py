"""A plan as a picture."""

from __future__ import annotations

from pathlib import Path

from sgl_kvpool.commands.plan.planned import Plan

__all__ = ["check_plot", "draw"]


def check_plot(path: Path) -> None:
    """ValueError without matplotlib, OSError for a path that cannot be written."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install 'sgl-kvpool[bench]'") from None
    if path.is_dir():
        raise ValueError(f"--plot {path} is a folder; name a file")
    existed = path.exists()
    with path.open("ab"):
        pass
    if not existed:
        path.unlink()


def _requests(count: int) -> str:
    return f"{count} request" if count == 1 else f"{count} requests"


def draw(plan: Plan, path: Path) -> None:
    """Draw tokens per layout, on device and host, as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    servers = [server for server in plan.servers if server.tokens]
    if not servers:
        raise ValueError("there is nothing to draw: every server is refused")
    figure = Figure(figsize=(8, 0.6 * len(servers) + 2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    places = range(len(servers))
    has_host = any(server.host_tokens for server in servers)
    height = 0.38 if has_host else 0.7
    bars = axes.barh(
        [place - (height / 2 if has_host else 0) for place in places],
        [server.tokens / 1e6 for server in servers],
        height=height,
        label="device",
    )
    axes.bar_label(bars, [_requests(server.requests) for server in servers], padding=3, fontsize=8)
    if has_host:
        axes.barh(
            [place + height / 2 for place in places],
            [server.host_tokens / 1e6 for server in servers],
            height=height,
            label="host",
        )
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    axes.set_yticks(list(places), [server.name for server in servers])
    axes.invert_yaxis()
    axes.margins(x=0.2)
    axes.set_xlabel("million tokens; sizes by SGLang for these arguments, not measured")
    axes.grid(axis="x", alpha=0.3)
    name = plan.model.get("name", plan.model_path)
    figure.suptitle(
        f"{name} on {plan.tp_size} x {plan.machine['gpu_gib']:g} GiB, "
        f"requests of {plan.context_tokens} tokens"
    )
    figure.savefig(path, dpi=120, format="png")
