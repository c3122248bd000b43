"""Free ports, and variables that bypass the user's proxy. Imports neither torch nor SGLang."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import urllib.request
from pathlib import Path

__all__ = ["free_port", "past_proxies"]

#: Ports for servers, below the range 22000 to 29999 from which SGLang draws its rendezvous ports.
_SERVER_PORTS = range(10000, 22000)

#: Ports that this process has chosen. SGLang binds its port only after the model is loaded.
_handed_out: set[int] = set()


def _first_ephemeral_port() -> int:
    """First ephemeral port, from which the kernel assigns ports to sockets."""
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 32768  # Linux's default


def free_port() -> int:
    """A free TCP port below the ephemeral range, so that the kernel does not assign it to another process.

    A server binds it only when its model is loaded. By then, a port of the ephemeral range (from `bind` to
    port 0) is sometimes in use by another process: each SGLang server requests a dozen such ports.

    Raises
    ------
    OSError
        If none of a hundred candidates is free.
    """
    end = _first_ephemeral_port()
    candidates = [port for port in _SERVER_PORTS if port < end and port not in _handed_out]
    # If the ephemeral range covers all these ports, the kernel chooses.
    for port in random.sample(candidates, min(100, len(candidates))) or [0]:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("0.0.0.0", port))
            _handed_out.add(port := probe.getsockname()[1])
            return port
    raise OSError(f"no free TCP port found among {_SERVER_PORTS.start} to {_SERVER_PORTS[-1]}")


def past_proxies() -> dict[str, str]:
    """Variables with which a server's requests to itself, such as its warm-up, bypass the user's proxy."""
    if urllib.request.getproxies_environment().keys() <= {"no"}:
        return {}
    excepted = os.environ.get("no_proxy") or os.environ.get("NO_PROXY")
    value = ",".join(filter(None, (excepted, "127.0.0.1", "localhost")))
    return {"no_proxy": value, "NO_PROXY": value}
