#!/usr/bin/env python3
"""Say for the installed SGLang which of the places hold where sgl-kvpool takes hold.

    python scripts/check_seams.py

Exits with 1 if any does not. Works on any SGLang version; importing its modules takes half a minute.
"""

from __future__ import annotations

import sys

from sgl_kvpool.sglang_plugin import seams


def main() -> int:
    """Print one line per seam; return the exit status."""
    try:
        version = seams.installed_version()
    except ImportError:
        print(seams.version_problem())
        return 1
    print(f"SGLang {version}")
    problem = seams.version_problem()
    if problem:
        print(f"  {problem}")
    broken = 0
    groups = {
        "every process": seams.SERVER_ARGS,
        "arguments of a server with a layout": seams.MODEL,
        "launcher of a server with a layout": seams.LAUNCHER,
        "scheduler of a server with a layout": seams.SCHEDULER,
    }
    for title, group in groups.items():
        print(f"{title}:")
        for seam in group:
            problems = seams.check([seam])
            broken += len(problems)
            kind = "hooked" if seam.hooked else "used"
            print(f"  {'FAILS' if problems else 'ok':5} {kind:6} {problems[0] if problems else seam.target}")
    print(f"{broken} seams do not hold" if broken else "all seams hold")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
