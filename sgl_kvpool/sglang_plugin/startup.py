"""Refusals of a scheduler that starts: the process that launched it says them, or raises them.

SGLang has a scheduler that fails log its traceback, and end the launcher by a signal, a program that called
`Engine(...)` too. A refusal takes another way: the scheduler leaves its text in a file and ends, and the
launcher, which notices that, reads it.
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
        # Not SystemExit: threads of a scheduler that is half built may keep its process from ending.
        os._exit(1)
    finally:
        for handler in handlers:
            handler.removeFilter(_without_traceback)


#: Function of SGLang -> hook around it.
HOOKS: Mapping[str, Callable] = {"sglang.srt.managers.scheduler.Scheduler.__init__": _init_scheduler}


def _without_traceback(record: logging.LogRecord) -> bool:
    """Shorten what SGLang logs of a refusal before it raises it again: the text says all."""
    refusal = record.exc_info[1] if record.exc_info else None
    if isinstance(refusal, Refusal):
        record.msg, record.args, record.exc_info = f"{record.getMessage()}: {refusal}", (), None
    return True


def leave(text: str) -> None:
    """Hand the text of a refusal to the launcher; say it where no launcher listens.

    Raises nothing: the caller ends the process, and a full disk must not keep it from that.
    """
    path = env.text(env.CHILD_REFUSAL)
    if path is not None:
        mine = Path(f"{path}-{os.getpid()}")
        with suppress(OSError):
            mine.write_text(text)
            mine.replace(path)  # in one step, and of the ranks that say the same the last
            return
    with suppress(OSError):
        print(line(text), file=sys.stderr, flush=True)


# -------------------------------------------------------------------- in the launcher


def refusal_path(server_args: Any) -> Path | None:
    """File in which the schedulers of a server shall leave a refusal; None if nobody would read it.

    Data-parallel ranks have a controller, which logs the end of one in its own way and ends the launcher:
    they say it themselves.
    """
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.runtime_context import num_dp_ranks_of

    view = resolving_view(server_args)
    if num_dp_ranks_of(view) > 1 or view.ep_join_mode == "scale":
        return None
    # Nothing is there until a scheduler writes it.
    return Path(tempfile.gettempdir()) / f"sgl-kvpool-refusal-{secrets.token_hex(16)}"


def relay(launched: Any, processes: Sequence[Any], path: Path, server_args: Any) -> None:
    """Have a launcher that waits for its schedulers raise what one of them was refused for.

    Parameters
    ----------
    launched : SchedulerInitResult
        SGLang's; its `wait_for_ready` is replaced.
    processes : sequence of Process
        The schedulers.
    path : Path
        Where they leave a refusal; removed when the wait is over.
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
            raise refusal from None
        finally:
            path.unlink(missing_ok=True)

    launched.wait_for_ready = wait_for_ready
