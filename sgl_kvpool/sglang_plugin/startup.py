"""Refusals while a scheduler starts, which the launching process prints or raises.

In SGLang, a scheduler that fails logs its traceback and ends the launcher by a signal, even if the launcher
is a program that called `Engine(...)`. With these hooks, a scheduler that is refused writes the text to a
file and exits; the launcher notices the exit and reads the file.
"""

from __future__ import annotations

import logging
import os
import secrets
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from sgl_kvpool import env
from sgl_kvpool.refusal import Refusal, line, say_alone
from sgl_kvpool.sglang_plugin import hook_points
from sgl_kvpool.sglang_plugin.options import is_from_command_line

__all__ = ["install", "leave", "refusal_path", "relay"]


# -------------------------------------------------------------------- in the scheduler


def install() -> None:
    """Hook the construction of this process's scheduler."""
    hook_points.wrap_all(HOOKS)


def _init_scheduler(original, self, *args, **kwargs):
    from sgl_kvpool.sglang_plugin.hooks import self_check

    handlers = logging.getLogger().handlers[:]
    for handler in handlers:
        handler.addFilter(_without_traceback)
    try:
        original(self, *args, **kwargs)
        self_check.run(self)
    except Refusal as refusal:
        leave(str(refusal))
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        # SystemExit would not do: threads of a half-built scheduler may keep its process alive.
        os._exit(1)
    finally:
        for handler in handlers:
            handler.removeFilter(_without_traceback)


#: Function of SGLang -> hook around it.
HOOKS: Mapping[str, Callable] = {"sglang.srt.managers.scheduler.Scheduler.__init__": _init_scheduler}


def _without_traceback(record: logging.LogRecord) -> bool:
    """Replace the traceback in SGLang's log record of a refusal by the refusal's text, which is complete."""
    refusal = record.exc_info[1] if record.exc_info else None
    if isinstance(refusal, Refusal):
        record.msg, record.args, record.exc_info = f"{record.getMessage()}: {refusal}", (), None
    return True


def leave(text: str) -> None:
    """Pass the text of a refusal to the launcher; print it where no launcher reads it.

    Errors of the file system are ignored, so that the caller can end the process even if the disk is full.
    """
    path = env.text(env.CHILD_REFUSAL)
    if path is not None:
        mine = Path(f"{path}-{os.getpid()}")
        with suppress(OSError):
            mine.write_text(text)
            mine.replace(path)  # atomic; if several ranks write the file, the last one stays
            return
    with suppress(OSError):
        print(line(text), file=sys.stderr, flush=True)


# -------------------------------------------------------------------- in the launcher

#: Refusals that `relay` has raised. Their tracebacks keep the TokenizerManager of an Engine that did not
#: start. If the garbage collector freed it, `zmq.Context.__del__` would wait forever for its open sockets.
_relayed: list[Refusal] = []


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


def relay(launched: Any, processes: Sequence[Any], path: Path, server_args: Any) -> None:
    """Make the launcher, which waits for its schedulers, raise the refusal that one of them has written.

    Parameters
    ----------
    launched : SchedulerInitResult
        SGLang's result of the launch; its `wait_for_ready` is replaced.
    processes : sequence of Process
        The schedulers.
    path : Path
        File of the refusal, from `refusal_path`; removed when the wait is over.
    server_args : ServerArgs
    """
    wait = launched.wait_for_ready

    def wait_for_ready() -> None:
        try:
            wait()
        except RuntimeError:
            if not path.exists():
                raise
            refusal = Refusal(path.read_text())
            for process in processes:  # other ranks may wait for the one that ended
                with suppress(OSError):
                    process.kill()
            if is_from_command_line(server_args):
                say_alone(refusal)
            _relayed.append(refusal)
            raise refusal from None
        finally:
            path.unlink(missing_ok=True)

    launched.wait_for_ready = wait_for_ready
