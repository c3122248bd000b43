"""The time on stderr while a user waits."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

#: Seconds until the first line, and between the others.
_FIRST_S, _NEXT_S = 5.0, 10.0


@contextmanager
def progress(what: str) -> Iterator[Callable[[str], None]]:
    """Print the elapsed seconds to stderr while the block runs: after 5 s, then every 10 s.

    Yields a function that sets a text, such as a count, which the following lines contain.
    """
    began, state, ended = time.monotonic(), [""], threading.Event()

    def show() -> None:
        wait_s = _FIRST_S
        while not ended.wait(wait_s):
            wait_s = _NEXT_S
            print(f"{what}{state[0]}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield lambda text: state.__setitem__(0, f", {text}")
    finally:
        ended.set()
        thread.join()
