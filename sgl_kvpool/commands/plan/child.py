"""Worker that queries SGLang: `python -m sgl_kvpool.commands.plan.child`.

SGLang is imported once, and each server is sized in a fork, since SGLang's arguments, caches and hooks are
global to a process. A job is a `machine`, the `model_path` of a server and its `arguments`.
"""

import functools
import multiprocessing
import re
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from sgl_kvpool.attention.decode_config import DEFAULT_SM_COUNT, HOPPER
from sgl_kvpool.commands.processes.worker import Jobs
from sgl_kvpool.refusal import Way, flags_of

_FORKS = multiprocessing.get_context("fork")
#: Modules with the rules; all must be imported before the GPU is described.
_MODULES = (
    "sglang.srt.entrypoints.engine",
    "sglang.srt.mem_cache.kv_cache_configurator",
    "sglang.srt.model_executor.model_runner",
)


def main() -> int:
    jobs = Jobs()
    import importlib

    for module in _MODULES:
        importlib.import_module(module)
    from sglang.srt.plugins import load_plugins

    from sgl_kvpool import env
    from sgl_kvpool.commands.doctor.probes import hook_groups
    from sgl_kvpool.sglang_plugin import fingerprint

    if not env.flag(env.ALLOW_UNTESTED) and (problem := fingerprint.problem()):
        sys.exit(problem)
    load_plugins()
    # A server on the described GPU checks its hook groups. Some of their modules look for a GPU when they are
    # imported, so they must be imported before the GPU is described.
    for group in hook_groups():
        group.problem()
    from sgl_kvpool.commands.plan.sizing import Machine

    enough: dict[tuple[Any, ...], str] = {}
    for server in jobs.begin():
        machine = Machine(**server["machine"])
        model_path, arguments = wanted = server["model_path"], server["arguments"]
        answer = _in_a_fork(wanted, machine)
        if "instead" in answer:  # the refusal names arguments that may help
            found = _in_a_fork((model_path, [*arguments, *answer["instead"]]), machine)
            if "refused" not in found:
                answer = {**found, "added": answer["instead"]}
        if "too_heavy" in answer:
            # Computed once: all layouts have the same weights.
            ranks = answer["too_heavy"]
            key = (model_path, *ranks.values())
            if key not in enough:
                enough[key] = _min_gpus_text(wanted, machine, **ranks)
            answer = {"refused": f"{answer['refused']}; {enough[key]}"}
        jobs.answer(answer)
    return 0


def _min_gpus_text(wanted: Any, machine: Any, tp_size: int, attention_ranks: int, heads: int) -> str:
    """Says how many GPUs would be enough. Tries larger tp sizes, each in a forked process."""
    groups = tp_size // attention_ranks  # groups of DP attention
    for ranks in range(attention_ranks + 1, heads + 1):
        count = groups * ranks
        if heads % ranks or machine.weights_gib / count >= machine.gpu_gib:
            continue
        model_path, arguments = wanted
        more = model_path, [*arguments, "--tp-size", str(count)]
        if "tokens" in _in_a_fork(more, replace(machine, gpu_count=max(count, 8))):
            return (
                f"{count} GPUs are enough (--tp {count}"
                f"{', more than a node of eight has' if count > 8 else ''})"
            )
    return f"no number of GPUs is enough if the attention ranks have to divide the {heads} heads"


def _in_a_fork(wanted: Any, machine: Any) -> dict[str, Any]:
    """Answer of the fork, or a failure if it ended without an answer."""
    reading, writing = _FORKS.Pipe(duplex=False)
    process = _FORKS.Process(target=lambda: writing.send(_answer(wanted, machine)))
    process.start()
    writing.close()
    try:
        return reading.recv()
    except EOFError:
        process.join()
        return {"failed": f"the process that sized it ended with status {process.exitcode}"}
    finally:
        process.join()


def _answer(wanted: Any, machine: Any) -> dict[str, Any]:
    """Sizes of a server, or the reason why SGLang would refuse it or cannot read the model."""
    from sgl_kvpool.commands.plan.plannable import IncompleteConfig, TooHeavy
    from sgl_kvpool.commands.plan.sizing import size_server
    from sgl_kvpool.srt.facts.topk_transform import UnsupportedCombination

    _describe(machine)
    model_path, arguments = wanted
    try:
        return size_server(model_path, arguments, machine)
    except TooHeavy as error:
        return {"refused": str(error), "too_heavy": error.ranks}
    except UnsupportedCombination as error:
        # Ways that change nothing that the user wrote.
        ways = [w for w in error.ways if isinstance(w, Way) and not w.flags & flags_of(arguments)]
        return {"refused": str(error)} | ({"instead": ways[0].add} if ways else {})
    except (OSError, IncompleteConfig) as error:
        # A missing model, no network or a config without sizes: the reason does not depend on the layout.
        traceback.print_exc()
        return {"unreadable": str(error)}
    except (ValueError, RuntimeError, NotImplementedError, AssertionError, SystemExit) as error:
        # The exceptions by which SGLang and our rules refuse arguments: the server would not start.
        traceback.print_exc()
        return {"refused": str(error) or _failing_line(error)}
    except Exception as error:  # SGLang's configuration classes do not check fields
        traceback.print_exc()
        return {
            "failed": f"sizing ended with {type(error).__name__}: {error}. Fields of config.json that are "
            "missing or have another type than SGLang reads cause this; else report a bug"
        }


def _failing_line(error: BaseException) -> str:
    """For an exception without a text, such as of a bare `assert`: its line, and the fields that it reads."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    last = traceback.extract_tb(error.__traceback__)[-1]
    read = re.findall(r"(\w+)\.(\w+)", last.line or "")
    fields = [(name, getattr(frame.f_locals.get(of), name, None)) for of, name in read]
    values = [f"{name} {value}" for name, value in fields if isinstance(value, int | float | str)]
    where = ", ".join(values) or f"{last.filename}, line {last.lineno}"
    return f"{type(error).__name__} of SGLang's {last.line!r} ({where})"


def _describe(machine: Any) -> None:
    """Make SGLang see a machine's GPUs, for good; modules with its rules must be imported before."""
    import torch
    from sglang.srt.arg_groups import mamba_hook
    from sglang.srt.utils import common

    name = "a Hopper GPU of sgl-kvpool plan"
    properties = SimpleNamespace(
        major=HOPPER[0], minor=HOPPER[1], name=name, multi_processor_count=DEFAULT_SM_COUNT,
        total_memory=int(machine.gpu_gib * 2**30),
    )  # fmt: skip
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: machine.gpu_count
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_capability = lambda *_: HOPPER
    torch.cuda.get_device_name = lambda *_: name
    torch.cuda.get_device_properties = lambda *_: properties
    for module in _sglang_modules():  # forget what was cached about this machine
        for value in list(vars(module).values()):
            if isinstance(value, functools._lru_cache_wrapper):
                value.cache_clear()
    # In MiB.
    _replace_everywhere(common.get_device_memory_capacity, lambda device=None: machine.gpu_gib * 1024)
    # This function asks the platform that SGLang chose at import, which was the CPU.
    _replace_everywhere(mamba_hook._platform_supports_mamba_cache_extra_buffer, lambda: True)


def _replace_everywhere(function: Callable, replacement: Callable) -> None:
    """Replace `function` in all modules of SGLang, under any name."""
    for module in _sglang_modules():
        for name, value in list(vars(module).items()):
            if value is function:
                setattr(module, name, replacement)


def _sglang_modules() -> list[Any]:
    return [module for name, module in list(sys.modules.items()) if name.partition(".")[0] == "sglang"]


if __name__ == "__main__":
    sys.exit(main())
