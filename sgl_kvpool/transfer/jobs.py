"""What compiled engines are told of a plan: the structs of csrc/staging.h as lists of numbers.

They are made once, when both sides of a transfer are known, and keep alive what they point to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace

import torch

from sgl_kvpool.transfer.conversion import RowConversion
from sgl_kvpool.transfer.plan import CopyRun

__all__ = ["KERNEL_BLOCKS", "CopyJob", "KernelJob", "RegisteredPieces", "counted_from"]

#: Blocks of a kernel, at most one per SM: a load or a store leaves the other SMs to the model.
KERNEL_BLOCKS = 16
#: Words that kernels copy, the widest first.
_WORD_BYTES = (16, 8, 4)


@dataclass(frozen=True)
class RegisteredPieces:
    """Host memory that was registered with CUDA piece by piece.

    Attributes
    ----------
    begin : int
        Address of the first byte.
    piece_bytes : int
        0 if no copy can touch two pieces.
    """

    begin: int = 0
    piece_bytes: int = 0


def counted_from(
    runs: Sequence[CopyRun], *, source_base: int = 0, target_base: int = 0
) -> tuple[CopyRun, ...]:
    """Copy runs whose addresses on a side count from a base."""
    return tuple(
        replace(
            run,
            source_address=run.source_address - source_base,
            target_address=run.target_address - target_base,
        )
        for run in runs
    )


def _table(runs: Sequence[CopyRun], device: torch.device | str) -> torch.Tensor:
    return torch.tensor([run.row for run in runs], dtype=torch.int64, device=device).view(-1, 8)


class KernelJob:
    """`KernelJob` of csrc/staging.h.

    Parameters
    ----------
    runs : sequence of CopyRun
    device : torch.device
        That runs the kernel.
    conversion : RowConversion, optional
        Of the rows, one per run.
    parts : sequence of int
        Places of the runs' layers in the group, for their k_scales; only with a conversion.

    Attributes
    ----------
    address : int
    """

    def __init__(
        self,
        runs: Sequence[CopyRun],
        device: torch.device,
        conversion: RowConversion | None = None,
        parts: Sequence[int] = (),
    ) -> None:
        table = _table(runs, device)
        kept = [table]
        pointers = [0, 0, 0]
        if conversion is not None:
            scales = torch.tensor([conversion.k_scales[i] for i in parts], dtype=torch.float32, device=device)
            formats = [torch.tensor(numbers, dtype=torch.int64) for numbers in conversion.numbers()]
            kept += [*formats, scales]
            pointers = [formats[0].data_ptr(), formats[1].data_ptr(), scales.data_ptr()]
        word_bytes = next(
            (w for w in _WORD_BYTES if not any(n % w for run in runs for n in _bytes_of(run))), 1
        )
        numbers = [table.data_ptr(), len(runs), word_bytes, KERNEL_BLOCKS, *pointers]
        self._numbers = torch.tensor(numbers, dtype=torch.int64)
        self._kept = kept
        self.address = self._numbers.data_ptr()


def _bytes_of(run: CopyRun) -> tuple[int, ...]:
    """Numbers of a run that are addresses or bytes."""
    return astuple(replace(run, run_count=0))


class CopyJob:
    """`CopyJob` of csrc/staging.h.

    Parameters
    ----------
    runs : sequence of CopyRun
    pieces : RegisteredPieces
        Of the host side.

    Attributes
    ----------
    address : int
    """

    def __init__(self, runs: Sequence[CopyRun], pieces: RegisteredPieces) -> None:
        table = _table(runs, "cpu")
        numbers = [table.data_ptr(), len(runs), pieces.begin, pieces.piece_bytes]
        self._numbers = torch.tensor(numbers, dtype=torch.int64)
        self._kept = table
        self.address = self._numbers.data_ptr()
