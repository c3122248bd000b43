"""Servers of one layout after the other, with a line of progress. Imports neither torch nor SGLang."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from http.client import HTTPException
from typing import Any

from sgl_kvpool.demo.forks import Forks
from sgl_kvpool.demo.server import Server, ServerFailed
from sgl_kvpool.layout import MLAKVCacheLayout

__all__ = ["dots", "import_once", "in_turn"]

#: What an answer in another form than SGLang's raises, and what a server that ends or hangs does.
_FAILURES = (ServerFailed, OSError, HTTPException, LookupError, TypeError, ValueError)


def import_once(forks: Forks) -> Forks | None:
    """The forks, once SGLang is imported; None if the process that imports it ends."""
    print("importing SGLang, once for all servers ", end="", flush=True)
    began = time.monotonic()
    try:
        with dots(), tempfile.NamedTemporaryFile() as output:
            forks.start([sys.executable, "-c", "pass"], os.environ, output.name).wait()
    except RuntimeError as error:
        print(f" failed: {error}\nEvery server imports it by itself, which takes longer.", flush=True)
        return None
    print(f" {time.monotonic() - began:.0f} s", flush=True)
    return forks


@contextlib.contextmanager
def dots() -> Iterator[None]:
    """Print a dot every 5 s while the block runs."""
    ended = threading.Event()

    def show() -> None:
        while not ended.wait(5):
            print(".", end="", flush=True)

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def in_turn(
    layouts: Sequence[MLAKVCacheLayout],
    server_of: Callable[[MLAKVCacheLayout], Server],
    ask: Callable[[Server, MLAKVCacheLayout, float], tuple[Any, str]],
    forks: Forks | None,
) -> tuple[list[Any], bool]:
    """Start each layout's server, ask it, stop it; what was found until one failed, and whether one did.

    `ask` gets the seconds of the start, and returns what it found and a text.
    """
    found: list[Any] = []
    for number, layout in enumerate(layouts, 1):
        print(f"[{number}/{len(layouts)}] {layout}: starting SGLang ", end="", flush=True)
        began, server = time.monotonic(), server_of(layout)
        server.forks = forks  # type: ignore[misc]
        try:
            with contextlib.ExitStack() as running:
                with dots():
                    running.enter_context(server)
                start_seconds = time.monotonic() - began
                print(f" ready after {start_seconds:.0f} s, ", end="", flush=True)
                result, text = ask(server, layout, start_seconds)
        except _FAILURES as error:
            what = "" if isinstance(error, ServerFailed) else f"{type(error).__name__}: "
            print(f" failed: {what}{error}\nthe server's log: {server.log}", flush=True)
            return found, True
        found.append(result)
        left = round((time.monotonic() - began) * (len(layouts) - number) / 60)
        print(f"{text}; about {left} minutes left" if left else text, flush=True)
    return found, False
