"""Child processes that answer in JSON, line by line, whatever their imports and libraries print."""

import json
import os
from typing import Any


class Answers:
    """In a child: its answers, on the stdout with which it was started; what is printed goes to stderr."""

    def __init__(self) -> None:
        # Descriptors, not sys.stdout, which a program such as pytest replaces.
        self._lines = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)

    def send(self, answer: Any) -> None:
        """Write one answer, as a line of its own."""
        print(json.dumps(answer), file=self._lines, flush=True)
