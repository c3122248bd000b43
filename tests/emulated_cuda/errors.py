"""Errors of the CUDA runtime, and the last one, which it keeps until somebody asks for it."""

from enum import IntEnum


class CudaError(IntEnum):
    """As `cudaError_t`."""

    SUCCESS = 0
    INVALID_VALUE = 1
    OUT_OF_MEMORY = 2
    CALL_REQUIRES_NEWER_DRIVER = 36
    INVALID_DEVICE_FUNCTION = 98
    INVALID_RESOURCE_HANDLE = 400
    LAUNCH_FAILURE = 719
    HOST_MEMORY_ALREADY_REGISTERED = 712
    HOST_MEMORY_NOT_REGISTERED = 713
    NOT_SUPPORTED = 801
    STREAM_CAPTURE_UNSUPPORTED = 900


class Refused(Exception):
    """A call that the runtime refuses with an error."""

    def __init__(self, error: CudaError, why: str = "") -> None:
        super().__init__(f"{error.name} {why}")
        self.error = error


_kept = CudaError.SUCCESS


def keep(error: CudaError) -> CudaError:
    """A call failed: `cudaGetLastError`, or the next operation of torch, reports its error."""
    global _kept
    _kept = error
    return error


def taken() -> CudaError:
    """As `cudaGetLastError`."""
    global _kept
    error, _kept = _kept, CudaError.SUCCESS
    return error


def raise_kept() -> None:
    """Report the kept error as torch does after a launch."""
    if _kept:
        raise RuntimeError(f"CUDA error: {taken().name}, left by an earlier call")
