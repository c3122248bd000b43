"""The first ten minutes on a GPU: correct and wrong kernels, and the tile table to commit.

Steps run in order of their value, each with a time limit; the limits add up to less than nine minutes.
"""

from scripts.kit.runner import Step
from scripts.servers.steps import TESTS, bench, checks

#: Time limit of all steps in minutes; a step that is ended then may take half a minute to stop.
MINUTES = 8.3
#: Test that compiles the transfer engines, for half a minute or more, while other tests run. Below
#: CUDA 12.8 it is skipped without compiling them.
_COMPILES = f"{TESTS}transfer_gpu.py::test_batches_are_used_where_cuda_has_them"


def first_light_steps(*, on_gpu: bool) -> list[Step]:
    """All steps in order; without a GPU those that can be rehearsed."""
    device = ("--device", "cuda" if on_gpu else "cpu")

    def tiles(heads: int, expected_s: float, limit_s: float) -> Step:
        # Triton's interpreter takes a second per block of rows.
        less = () if on_gpu else ("--only", "layout=fp4")
        words = ("tiles", "--continue", "--only", f"heads={heads}", *less, *device)
        what = f"tiles and splits of mla_decode, {heads} heads"
        return bench(f"tiles-{heads}", what, limit_s, expected_s, *words)

    def quick(name: str, what: str, limit_s: float, expected_s: float, *words: str) -> Step:
        return bench(f"{name}-quick", what, limit_s, expected_s, name, "--quick", *device, *words)

    core = checks(
        "core", "every kernel against its reference", 135, f"{TESTS}mla_decode_gpu.py",
        f"{TESTS}codec_gpu.py", "--first", _COMPILES, "--then", f"{TESTS}transfer_gpu.py",
    )  # fmt: skip
    return [
        *([core, tiles(16, 55, 75)] if on_gpu else [tiles(2, 60, 150)]),
        quick("attention", "mla_decode beside FlashMLA, if it is installed", 65, 50, "--minutes", "0.8"),
        *([tiles(8, 35, 45), tiles(32, 35, 45), tiles(64, 18, 25)] if on_gpu else []),
        quick("codec", "speed of the codec", 28, 18),
        quick("transfer", "transfer engines beside a pinned copy", 60, 50),
    ]  # fmt: skip
