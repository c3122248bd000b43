"""System calls that the kernel refuses from now on in this process, as in a container with limits."""

import ctypes
import errno
import os
import struct

#: Numbers of system calls, and of the audit's name of the machine.
NUMBERS = {
    "x86_64": {"seccomp": 317, "clone": 56, "clone3": 435},
    "aarch64": {"seccomp": 277, "clone": 220, "clone3": 435},
}
THREADS = ("clone", "clone3")


def refuse(*calls: str, code: int = errno.EAGAIN) -> None:
    """Let system calls of all threads of this process fail with `code`, until it ends."""
    numbers = NUMBERS[os.uname().machine]
    load, equal, end = 0x20, 0x15, 0x06  # of BPF: the word at an offset, a jump, the result
    steps = [(load, 0, 0, 0), *((equal, len(calls) - at, 0, numbers[name]) for at, name in enumerate(calls))]
    steps += [(end, 0, 0, 0x7FFF0000), (end, 0, 0, 0x50000 | code)]  # allow, fail
    code_bytes = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = struct.pack("HxxxxxxQ", len(steps), ctypes.addressof(code_bytes))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # no new privileges: what the kernel asks of accounts
    status = libc.syscall(ctypes.c_long(numbers["seccomp"]), 1, 1, program)  # a filter for all threads
    assert status == 0, os.strerror(ctypes.get_errno())
