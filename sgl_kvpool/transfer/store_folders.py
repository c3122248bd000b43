"""Folders in which SGLang's stores keep pages as files, and whether other accounts can reach them.

Whoever may read the folder reads the rows of every prompt; whoever may write into it, or replace it, can make
this server read pages of theirs. Checksums do not prevent that, because their seed can be computed.
"""

import os
import pwd
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sgl_kvpool.refusal import Refusal

#: Links that Linux follows in one path.
_MOST_LINKS = 40


@dataclass(frozen=True)
class FileStore:
    """A store of SGLang's that keeps pages as files, in folders that `variable` names."""

    variable: str
    default: str

    def folders(self, configuration: Mapping[str, Any] | None = None) -> list[Path]:
        """Its folders, with a --hicache-storage-backend-extra-config; none if it keeps objects elsewhere."""
        configuration = configuration or {}
        if self is FILE_STORES["file"]:
            return [
                Path(os.environ.get(self.variable) or configuration.get("file_storage_path") or self.default)
            ]
        plugin = os.environ.get("SGLANG_HICACHE_NIXL_BACKEND_PLUGIN", "")
        if "plugin" in configuration:
            plugins, yes = configuration["plugin"], (True, "true", "True")
            try:  # SGLang takes the first that is active
                plugin = next(name for name, item in plugins.items() if item.get("active") in yes).upper()
            except (AttributeError, StopIteration):
                found = ", ".join(plugins) if isinstance(plugins, dict) else type(plugins).__name__
                raise Refusal(
                    f'"plugin" of --hicache-storage-backend-extra-config ({found or "empty"}) has no active '
                    'plugin; give one, as {"plugin": {"posix": {"active": true}}} does'
                ) from None
        if plugin == "OBJ":
            return []
        named = (os.environ.get(self.variable) or self.default).split(",")
        return [Path(name.strip()) for name in named if name.strip()]

    def make_private(self, folder: Path) -> None:
        """Make a folder that only this account can enter, unless it exists; Refusal if that fails."""
        try:
            os.makedirs(folder, mode=0o700, exist_ok=True)
        except OSError as error:
            raise Refusal(
                f"the folder {folder} of the store cannot be made ({error.strerror}); set {self.variable} to "
                "a folder of this account"
            ) from error

    def warning(self, folder: Path) -> str | None:
        """Warning about a folder that other accounts can reach, and what to change; None if they cannot."""
        facts = exposure(folder)
        if facts is None:
            return None
        return (
            f"other accounts can read or replace pages of the store in {folder}: {facts}; use a folder that "
            f"only this account can enter and replace (chmod 700), or set {self.variable} to one"
        )


#: Value of --hicache-storage-backend -> store.
FILE_STORES = {
    "file": FileStore("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", "/tmp/hicache"),
    "nixl": FileStore("SGLANG_HICACHE_NIXL_BACKEND_STORAGE_DIR", "/tmp/hicache_storage"),
}


def exposure(folder: Path) -> str | None:
    """What lets other accounts read, write or replace a folder, with the facts; None if nothing does.

    Root and this account are trusted. Access for a group is taken as intended, so that two accounts can share
    a folder. Links, and the folders that a lookup passes, are checked too.
    """
    facts: list[str] = []
    parent: tuple[Path, os.stat_result] | None = None
    place, status = folder, None
    for place, status in _steps(folder):
        if parent is not None:
            mode = stat.S_IMODE(parent[1].st_mode)
            if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:  # the sticky bit keeps others from it
                facts.append(f"any account may replace what is in {parent[0]} (mode {mode:04o})")
        if status is None:
            if parent is not None and parent[1].st_mode & stat.S_IWOTH:
                facts.append(f"{place} does not exist, and any account may make it first")
            break
        if status.st_uid not in (0, os.geteuid()):
            facts.append(f"{place} belongs to {_account(status.st_uid)}")
        parent = None if stat.S_ISLNK(status.st_mode) else (place, status)
    else:
        if status is not None and status.st_mode & stat.S_IRWXO:
            mode = stat.S_IMODE(status.st_mode)
            what = "write into" if mode & stat.S_IWOTH else "read"
            facts.append(f"any account may {what} {place} (mode {mode:04o})")
    return "; ".join(dict.fromkeys(facts)) or None


def _steps(folder: Path) -> Iterator[tuple[Path, os.stat_result | None]]:
    """Every folder and link that a lookup passes, in order; the first that does not exist ends with None."""
    here = Path("/")
    yield here, os.lstat(here)
    names = list(reversed(folder.absolute().parts[1:]))
    links = 0
    while names:
        name = names.pop()
        if name == "..":
            here = here.parent
            continue
        place = here / name
        try:
            status = os.lstat(place)
        except OSError:  # missing, or below a folder that this account may not enter
            yield place, None
            return
        yield place, status
        if not stat.S_ISLNK(status.st_mode):
            here = place
            continue
        links += 1
        if links > _MOST_LINKS:
            return
        target = Path(os.readlink(place))
        here = Path("/") if target.is_absolute() else here
        names += reversed(target.parts[target.is_absolute() :])


def _account(uid: int) -> str:
    try:
        return f"account {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"account {uid}"
