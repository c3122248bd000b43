"""Executes NVIDIA PTX (sm_90a) on a CPU, with strict checks: see ``docs/developing.md``.

    module = Module(ptx_text)
    result = module.launch("kernel", grid=(4,), block=(128,), args=[tensor, 7, 0.5, None])

The sources are in ``emulator``, the library is compiled at its first use.
"""

from __future__ import annotations

import ctypes
import functools
import json
import struct
from collections.abc import Iterable
from typing import Any

import ptxrun_builds


class PtxError(RuntimeError):
    """The PTX cannot be parsed or executed, a GPU would fault or hang, or the result would be undefined.

    `result` holds what the launch found so far; it is None if there was no launch.
    """

    result: Result | None = None


class Races(PtxError):
    """The launch ran to its end, but races or other hazards were reported."""


class _Region(ctypes.Structure):
    _fields_ = (
        ("base", ctypes.c_uint64),
        ("size", ctypes.c_uint64),
        ("readonly", ctypes.c_uint32),
        ("pad", ctypes.c_uint32),
        ("name", ctypes.c_char_p),
    )


#: Options of `Module.launch` and their defaults, in the order of Config in emulator/state.h.
OPTIONS = {
    "uninit_regs": 1, "uninit_shared": 1, "races": 1, "global_races": 1, "approx": 0, "mma": 0, "quantum": 24,
    "timing": 1, "touched": 0,
}  # fmt: skip


class _Config(ctypes.Structure):
    _fields_ = (
        ("seed", ctypes.c_uint64),
        ("limit", ctypes.c_uint64),
        *((name, ctypes.c_uint32) for name in OPTIONS),
    )


@functools.cache
def _library() -> ctypes.CDLL:
    lib = ctypes.CDLL(str(ptxrun_builds.library()))
    lib.ptx_parse.restype = ctypes.c_void_p
    lib.ptx_parse.argtypes = [ctypes.c_char_p, ctypes.POINTER(ctypes.c_void_p)]
    lib.ptx_free.argtypes = lib.ptx_delete.argtypes = [ctypes.c_void_p]
    lib.ptx_launch.restype = None
    lib.ptx_launch.argtypes = [
        ctypes.c_void_p, ctypes.c_char_p, ctypes.POINTER(ctypes.c_uint32), ctypes.c_uint32, ctypes.c_uint32,
        ctypes.c_char_p, ctypes.c_uint32, ctypes.POINTER(_Region), ctypes.c_uint32, ctypes.POINTER(_Config),
        ctypes.POINTER(ctypes.c_void_p),
    ]  # fmt: skip
    return lib


def _text(pointer: ctypes.c_void_p) -> str:
    """A string that the library allocated."""
    value = ctypes.string_at(pointer).decode(errors="replace")
    _library().ptx_free(pointer)
    return value


def memory_of(x: Any) -> tuple[int, int]:
    """(address, bytes) of a tensor's whole storage or a numpy array; such a pair is returned unchanged."""
    if isinstance(x, tuple):
        return x
    if hasattr(x, "untyped_storage"):
        if x.device.type != "cpu":
            raise ValueError("a tensor that is not on the CPU")
        storage = x.untyped_storage()
        return storage.data_ptr(), storage.nbytes()
    while getattr(x, "base", None) is not None and hasattr(x.base, "ctypes"):
        x = x.base
    return x.ctypes.data, x.nbytes


class Result:
    """What a launch found: `reports` with `kind`, `text` and `count`; how many `instructions` warps executed.

    `touched`, with the option of that name: runs of bytes that were read (False) or written (True), as base
    of the region, first byte, bytes.
    """

    def __init__(self, found: dict[str, Any]) -> None:
        self.error = found["error"]
        self.reports = found["reports"]
        self.instructions = found["instructions"]
        self.touched = [(base, start, size, bool(write)) for base, start, size, write in found["touched"]]
        self._lines = found["lines"]

    @functools.cached_property
    def lines(self) -> list[dict[str, Any]]:
        """One for each executed instruction, with its `line` of the PTX.

        `units`: sectors of 32 bytes of a global access, passes over the banks of a shared access, operations
        of a product; `ideal`: the fewest units that the bytes need.
        """
        names = ("line", "class", "name", "count", "lanes", "units", "ideal", "bytes")
        return [dict(zip(names, row, strict=True)) for row in self._lines]

    def total(self, what: str, *classes: str) -> int:
        """Sum of a column of `lines` over classes of instructions."""
        return sum(row[what] for row in self.lines if row["class"] in classes)

    def _above_least(self, *classes: str) -> list[dict[str, Any]]:
        return [row for row in self.lines if row["class"] in classes and row["units"] > row["ideal"]]

    def bank_conflicts(self) -> list[dict[str, Any]]:
        """Lines that need more passes over the banks than their bytes do."""
        return self._above_least("ld_shared", "st_shared", "ldmatrix")

    def uncoalesced(self) -> list[dict[str, Any]]:
        """Lines that touch more sectors than their bytes fill."""
        return self._above_least("ld_global", "st_global", "cp_async")


class Module:
    """Parsed PTX: `params` and `param_bytes` of its `kernels` by name.

    Instructions that the emulator does not know are `unsupported`; an error only when they are executed.
    """

    def __init__(self, ptx: str) -> None:
        self._handle = None
        out = ctypes.c_void_p()
        self._handle = _library().ptx_parse(ptx.encode(), ctypes.byref(out))
        described = _text(out)
        if not self._handle:
            raise PtxError(described)
        found = json.loads(described)
        self.kernels = {kernel["name"]: kernel for kernel in found["kernels"]}
        self.unsupported = found["unsupported"]
        self.ptx = ptx

    def __del__(self) -> None:
        if self._handle:
            _library().ptx_delete(self._handle)

    def launch(
        self,
        entry: str | None = None,
        grid: Any = 1,
        block: int = 1,
        args: Iterable[Any] = (),
        dynamic_shared_bytes: int = 0,
        *,
        regions: Iterable[Any] = (),
        readonly: Iterable[Any] = (),
        seed: int = 0,
        limit: int = 0,
        **options: int,
    ) -> Result:
        """Run a kernel with `block` threads: PtxError at a fault, Races at the end if there were hazards.

        entry : the kernel's name, needed if there are several
        args : numbers, tensors (their data pointer), None (0), bytes (structs)
        regions : more memory that it may access: tensors, (address, bytes), or a dict of them by name
        readonly : tensors, or (address, bytes), that it must not write
        seed : decides the order in which warps go and asynchronous work lands
        limit : most instructions of the warps of a CTA; 0: 200 million
        options : of `OPTIONS`. `approx`: results of approximate functions deviate by up to one unit in the
            last place; `mma`: 1 truncates sums of products, as publications say Hopper does; `quantum`: most
            instructions that a warp executes in one turn
        """
        if entry is None:
            (entry,) = self.kernels
        kernel = self.kernels[entry]
        if unknown := options.keys() - OPTIONS.keys():
            raise TypeError(f"no option {', '.join(unknown)}")
        named = regions if isinstance(regions, dict) else {f"region {i}": x for i, x in enumerate(regions)}
        args = list(args)
        table = _regions(
            {f"argument {i}": x for i, x in enumerate(args) if _is_memory(x)} | named, [*readonly]
        )
        data = _parameters(kernel, args)
        config = _Config(seed=seed, limit=limit, **OPTIONS | {name: int(x) for name, x in options.items()})
        out = ctypes.c_void_p()
        _library().ptx_launch(
            self._handle, entry.encode(), _three(grid), block, dynamic_shared_bytes, bytes(data), len(data),
            table, len(table), ctypes.byref(config), ctypes.byref(out),
        )  # fmt: skip
        result = Result(json.loads(_text(out)))
        if result.error:
            error = PtxError(result.error)
        elif result.reports:
            texts = [f"{r['kind']} ({r['count']} times): {r['text']}" for r in result.reports[:8]]
            more = [f"... {len(result.reports)} in all"] if len(result.reports) > 8 else []
            error = Races("\n".join(texts + more))
        else:
            return result
        error.result = result
        raise error


def _is_memory(x: Any) -> bool:
    return hasattr(x, "data_ptr") or hasattr(x, "ctypes")


def _three(x: Any) -> ctypes.Array:
    numbers = [int(n) for n in (x if hasattr(x, "__len__") else (x,))]
    return (ctypes.c_uint32 * 3)(*numbers, *[1] * (3 - len(numbers)))


def _regions(named: dict[str, Any], readonly: list[Any]) -> ctypes.Array:
    """Memory that the kernel may access, one region per storage."""
    spans: dict[int, tuple[int, str]] = {}
    for name, x in [*named.items(), *((f"read-only {i}", x) for i, x in enumerate(readonly))]:
        base, size = memory_of(x)
        if size > spans.get(base, (0, ""))[0]:
            spans[base] = (size, spans.get(base, (0, name))[1])
    locked = {memory_of(x)[0] for x in readonly}
    rows = [(base, size, base in locked, 0, name.encode()) for base, (size, name) in sorted(spans.items())]
    return (_Region * len(rows))(*rows)


def _parameters(kernel: dict[str, Any], args: list[Any]) -> bytearray:
    """The bytes of a kernel's parameters."""
    params = kernel["params"]
    # Triton's kernels take two pointers to scratch memory behind their own arguments.
    if not len(args) <= len(params) <= len(args) + 2:
        raise ValueError(f"{len(args)} arguments for {len(params)} parameters")
    data = bytearray(kernel["param_bytes"])
    for i, (param, value) in enumerate(zip(params, args, strict=False)):
        at, size = param["offset"], param["size"]
        if isinstance(value, bytes | bytearray):
            raw = bytes(value)
            if len(raw) != size:
                raise ValueError(f"parameter {i} has {size} bytes, not {len(raw)}")
        elif _is_memory(value):
            raw = struct.pack("<Q", value.data_ptr() if hasattr(value, "data_ptr") else value.ctypes.data)
        elif isinstance(value, float) or param["float"]:
            raw = struct.pack({2: "<e", 4: "<f", 8: "<d"}[size], value)
        else:
            raw = (int(value or 0) & ((1 << 8 * size) - 1)).to_bytes(size, "little")
        data[at : at + size] = raw
    return data
