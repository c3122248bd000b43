"""One probe in its own process: ``python -P -m sgl_kvpool.commands.doctor.child NAME`` prints its finding."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict

from sgl_kvpool.commands.doctor import probes


def _self_check() -> probes.Finding:
    from sgl_kvpool.commands.doctor.self_check import self_check  # imports torch

    return self_check()


_PROBES = {
    "hook points": probes.hook_points,
    "gpu": probes.gpu,
    "host": probes.host,
    "self-check": _self_check,
}


def main() -> None:
    """The answer is the last line of stdout; whatever imports print goes to stderr."""
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    finding = _PROBES[sys.argv[1]]()
    with answer:
        answer.write("\n" + json.dumps(asdict(finding)) + "\n")


if __name__ == "__main__":
    main()
