"""Refusals while a scheduler starts, which the launching process prints or raises.

In SGLang, a scheduler that fails logs its traceback and ends the launcher by a signal, even if the launcher
is a program that called `Engine(...)`. Here, a scheduler that is refused writes the text to a
file and exits; the launcher notices the exit and reads the file.
"""

import logging
import os
import secrets
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from sgl_kvpool import env
from sgl_kvpool.refusal import Refusal, line, print_without_traceback
from sgl_kvpool.sglang_plugin.options import config_of
from sgl_kvpool.sglang_plugin.registry import uses

uses("sglang.srt.runtime_context.num_dp_ranks_of", "launcher", takes=("cfg",))


@contextmanager
def ending_when_refused() -> Iterator[None]:
    """End this process, a scheduler, if it is refused in the block; the launcher gets the refusal's text."""
    handlers = logging.getLogger().handlers[:]
    for handler in handlers:
        handler.addFilter(_without_traceback)
    try:
        yield
    except Refusal as refusal:
        write_refusal(str(refusal))
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        # SystemExit would not do: threads of a half-built scheduler may keep its process alive.
        os._exit(1)
    finally:
        for handler in handlers:
            handler.removeFilter(_without_traceback)


def _without_traceback(record: logging.LogRecord) -> bool:
    """Replace the traceback in SGLang's log record of a refusal by the refusal's text, which is complete."""
    refusal = record.exc_info[1] if record.exc_info else None
    if isinstance(refusal, Refusal):
        record.msg, record.args, record.exc_info = f"{record.getMessage()}: {refusal}", (), None
    return True


def write_refusal(text: str) -> None:
    """Pass the text of a refusal to the launcher; print it where no launcher reads it.

    Errors of the file system are ignored, so that the caller can end the process even if the disk is full.
    """
    path = env.text(env.CHILD_REFUSAL)
    if path is not None:
        mine = Path(f"{path}-{os.getpid()}")
        with suppress(OSError):
            mine.write_text(text, encoding="utf-8", errors="backslashreplace")
            mine.replace(path)  # atomic; if several ranks write the file, the last one stays
            return
    with suppress(OSError):
        print("\n".join(map(line, text.splitlines())), file=sys.stderr, flush=True)


#: Refusals that the launcher has raised. Their tracebacks keep the TokenizerManager of an Engine that did not
#: start. If the garbage collector freed it, `zmq.Context.__del__` would wait forever for its open sockets.
_raised: list[Refusal] = []


def refusal_path(server_args: Any) -> Path | None:
    """File to which the schedulers of a server write a refusal; None if no process would read it.

    Data-parallel ranks have a controller, which logs the exit of a rank in its own way and ends the launcher.
    These ranks print the refusal themselves.
    """
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.runtime_context import num_dp_ranks_of

    view = resolving_view(server_args)
    if num_dp_ranks_of(view) > 1 or view.ep_join_mode == "scale":
        return None
    # The file does not exist until a scheduler writes it.
    return Path(tempfile.gettempdir()) / f"sgl-kvpool-refusal-{secrets.token_hex(16)}"


@contextmanager
def raising_written_refusal(path: Path | None, processes: Sequence[Any], server_args: Any) -> Iterator[None]:
    """Around the launcher's wait for its schedulers: raise the refusal that one has written to `path`."""
    try:
        yield
    except RuntimeError:
        if path is None or not path.exists():
            raise
        refusal = Refusal(path.read_text(encoding="utf-8"))
        for process in processes:  # other ranks may wait for the one that ended
            with suppress(OSError):
                process.kill()
        if config_of(server_args).is_command_line:
            print_without_traceback(refusal)
        _raised.append(refusal)
        raise refusal from None
    finally:
        if path is not None:
            path.unlink(missing_ok=True)
