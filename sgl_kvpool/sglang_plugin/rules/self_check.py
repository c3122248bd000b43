"""The only place that decides whether a scheduler runs the self-check when it starts."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["FIRST_LIGHT", "FirstLight", "why_due"]


@dataclass(frozen=True)
class FirstLight:
    """A run of `scripts/h100_regression.py --first-light` that found every kernel equal to its reference.

    Attributes
    ----------
    file : str
        Its first_light.json, in docs/benchmarks/ of the repository.
    capability : tuple of int
        Compute capability of the GPU.
    triton : str
        Version that compiled the kernels; a server's Triton compiles them anew.
    """

    file: str
    capability: tuple[int, int]
    triton: str


#: Committed runs: none yet. An installed wheel has no docs/, so the needed facts of a run stand here, and
#: tests/sglang_plugin/test_self_check.py compares each entry with its file.
FIRST_LIGHT: tuple[FirstLight, ...] = ()


def why_due(
    version_problem: str | None, device: str, capability: tuple[int, int] | None, triton: str | None
) -> str | None:
    """Why a scheduler has to run the self-check; None if it need not.

    Parameters
    ----------
    version_problem : str or None
        Why the installed SGLang is not a tested one, which KVPOOL_ALLOW_UNTESTED=1 accepted.
    device : str
        Type of the device.
    capability : tuple of int, optional
        Compute capability of the GPU.
    triton : str, optional
        Installed version of Triton.
    """
    if version_problem is not None:
        return "this SGLang is not a tested one"
    if device != "cuda":
        return None
    if any((run.capability, run.triton) == (capability, triton) for run in FIRST_LIGHT):
        return None
    return "no committed test run of these kernels on such a GPU"
