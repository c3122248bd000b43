#!/usr/bin/env python3
"""Check every hook point of sgl-kvpool in the installed SGLang.

    python scripts/check_hook_points.py

Exits with 1 if a hook point fails. Works on any SGLang version; importing its modules takes half a minute.
"""

from __future__ import annotations

import sys

from sgl_kvpool.sglang_plugin import hook_points, point_lists


def main() -> int:
    """Print one line per hook point; return the exit status."""
    try:
        version = hook_points.installed_version()
    except ImportError:
        print(hook_points.version_problem())
        return 1
    print(f"SGLang {version}")
    problem = hook_points.version_problem()
    if problem:
        print(f"  {problem}")
    broken = 0
    groups = {
        "every process": point_lists.SERVER_ARGS,
        "arguments of a server with a layout": point_lists.MODEL,
        "launcher of a server with a layout": point_lists.LAUNCHER,
        "scheduler of a server with a layout": point_lists.SCHEDULER,
        **{
            f"prefill or decode server with a layout on a CPU, over {backend}": group
            for backend, group in point_lists.DISAGGREGATION_ON_CPU.items()
        },
    }
    for title, group in groups.items():
        print(f"{title}:")
        for point in group:
            problems = hook_points.check([point])
            broken += len(problems)
            kind = "hooked" if point.hooked else "used"
            print(f"  {'FAILS' if problems else 'ok':5} {kind:6} {problems[0] if problems else point.target}")
    print(f"{broken} hook points fail" if broken else "all hook points hold")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
