"""What commands share: the time on stderr while a user waits, a child's answers."""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

#: Seconds until the first line of `progress`, and between the others.
_FIRST_S, _NEXT_S = 5.0, 10.0


@contextmanager
def progress(what: str) -> Iterator[Callable[[str], None]]:
    """Print the elapsed seconds to stderr while the block runs: after 5 s, then every 10 s.

    Yields a function that sets a text, such as a count, which the following lines contain.
    """
    began, state = time.monotonic(), [""]

    def show() -> None:
        print(f"{what}{state[0]}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)

    with repeating(show, _FIRST_S, _NEXT_S):
        yield lambda text: state.__setitem__(0, f", {text}")


@contextmanager
def repeating(show: Callable[[], None], first_s: float, next_s: float) -> Iterator[None]:
    """Call `show` in a thread while the block runs: after `first_s` seconds, then every `next_s`."""
    ended = threading.Event()

    def run() -> None:
        wait_s = first_s
        while not ended.wait(wait_s):
            wait_s = next_s
            show()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


class Answers:
    """In a child: JSON on the stdout with which it was started; what its imports print goes to stderr."""

    def __init__(self) -> None:
        # Descriptors, not sys.stdout, which a program such as pytest replaces.
        self._lines = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)

    def send(self, answer: Any) -> None:
        print(json.dumps(answer), file=self._lines, flush=True)
