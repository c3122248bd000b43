"""Shared libraries that Mooncake's programs load by name, for systems without them.

Mooncake's wheel needs the system's libibverbs, libnuma and libcurl. NIXL's wheel includes all three under
other names. Links to NIXL's copies, in the user's cache folder, let Mooncake start without root and without
packages of the distribution.
"""

import contextlib
import ctypes
import hashlib
import importlib.util
import os
from pathlib import Path

_WANTED = ("libibverbs.so.1", "libnuma.so.1", "libcurl.so.4")
_PACKAGE = "nixl_cu13"


def library_path() -> str:
    """Value of LD_LIBRARY_PATH for Mooncake's programs, and for servers that use Mooncake.

    If a library is missing, folders of links and of NIXL's libraries come before this process's value.

    ValueError if a library is missing, and NIXL's wheel does not have it either; OSError if the links cannot
    be written.
    """
    given = os.environ.get("LD_LIBRARY_PATH", "")
    missing = [name for name in _WANTED if not _loads(name)]
    if not missing:
        return given
    libraries = _nixl_libraries()
    found = {name: path for name in missing if (path := _in_wheel(libraries, name)) is not None}
    absent = [name for name in missing if name not in found]
    if absent:
        raise ValueError(
            f"Mooncake needs {', '.join(absent)}, which neither this machine nor {_PACKAGE} has; "
            "install sgl-kvpool[distributed], or the system's libibverbs1, libnuma1 and libcurl4"
        )
    # One folder per environment and NIXL: another environment may have another NIXL, or be deleted.
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "sgl-kvpool"
    links = cache / f"libraries-{hashlib.sha256(repr(found).encode()).hexdigest()[:16]}"
    links.mkdir(parents=True, exist_ok=True)
    for name, path in found.items():
        with contextlib.suppress(FileExistsError):
            (links / name).symlink_to(path)
    return os.pathsep.join(filter(None, (str(links), str(libraries), given)))


def _loads(name: str) -> bool:
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def _nixl_libraries() -> Path | None:
    """Folder of the libraries in NIXL's wheel; None without that package."""
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent.with_name(f"{_PACKAGE}.libs")


def _in_wheel(libraries: Path | None, name: str) -> Path | None:
    """The library under the wheel's name: `libnuma.so.1` is `libnuma-<hash>.so.1.0.0` there."""
    stem, _, version = name.partition(".so.")
    found = [] if libraries is None else sorted(libraries.glob(f"{stem}-*.so.{version}*"))
    return found[0] if found else None
