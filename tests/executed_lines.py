"""Which lines of the package ran: `--executed FILE` adds those of a run of pytest to a file.

`scripts/unexecuted_lines.py` prints the others. Bodies of GPU kernels are compiled, so they never run.
"""

import json
import sys
import threading
from collections import defaultdict
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "sgl_kvpool"


class ExecutedLines:
    """Notes the lines that run between `start` and `stop`, in threads too."""

    def __init__(self):
        self.lines = defaultdict(set)

    def start(self):
        threading.settrace(self._enter)
        sys.settrace(self._enter)

    def stop(self):
        sys.settrace(None)
        threading.settrace(None)

    def _enter(self, frame, event, argument):
        name = frame.f_code.co_filename
        if not name.startswith(str(PACKAGE)):
            return None
        lines = self.lines[str(Path(name).relative_to(PACKAGE))]

        def line(frame, event, argument):
            if event == "line":
                lines.add(frame.f_lineno)
            return line

        return line

    def add_to(self, file):
        """Add the lines to those of earlier runs in a JSON file."""
        found = json.loads(file.read_text()) if file.exists() else {}
        for name, lines in self.lines.items():
            found[name] = sorted(lines.union(found.get(name, [])))
        file.write_text(json.dumps(found, sort_keys=True) + "\n")
