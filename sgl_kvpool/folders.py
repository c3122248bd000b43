"""Folders that this account keeps: where they are, how they are made, and what other accounts can do there.

Whoever can write a folder of compiled code runs code of theirs in the process that loads it; whoever can read
or write a folder of stored pages has the rows of every prompt, or forges them.
"""

import os
import pwd
import stat
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

from sgl_kvpool.refusal import Refusal

#: Variable with the folder of caches, and its default.
CACHE = ("XDG_CACHE_HOME", "~/.cache")
#: Links that Linux follows in one path.
_MOST_LINKS = 40


def named(variable: str, default: str) -> Path:
    """Folder that a variable names, else the default; Refusal if ~ at its begin stands for no home folder."""
    text = os.environ.get(variable) or default
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise Refusal(
            f"{text} cannot be found, as neither HOME nor passwd names a home folder; set {variable} to a "
            "folder of this account"
        ) from None


def make_private(folder: Path, variable: str, of: str = "") -> None:
    """Make a folder and its parents with mode 0700, unless they exist; Refusal if that fails."""
    above = takewhile(lambda one: not one.exists(), folder.parents)
    try:
        for one in (*reversed(list(above)), folder):
            one.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise Refusal(
            f"the folder {folder}{of} cannot be made ({error.strerror}); set {variable} to "
            "a folder of this account"
        ) from error


def own(folder: Path, variable: str) -> Path:
    """A folder of code or weights, made with mode 0700 if it is missing; Refusal as `require_own`."""
    make_private(folder, variable)
    require_own(folder, variable)
    return folder


def require_own(path: Path, variable: str) -> None:
    """Refusal if other accounts can change a file or folder of code or weights, which `variable` moves."""
    if (facts := exposure(path, reading=False)) is not None:
        raise Refusal(
            f"other accounts can change what is loaded from {path}: {facts}; use a folder that only this "
            f"account can write (chmod 700), or set {variable} to one"
        )


def exposure(path: Path, *, reading: bool = True) -> str | None:
    """What lets other accounts read, write or replace a folder or file, with the facts; None if nothing does.

    Root and this account are trusted; in a user namespace without root, so are all accounts from outside it,
    except where any account may make entries. Access for a group is taken as intended, so that two accounts
    can share a folder. Links, and the folders that a lookup passes, are checked too. Without `reading`, other
    accounts may read it.
    """
    facts: list[str] = []
    parent: tuple[Path, os.stat_result] | None = None
    place, status = path, None
    trusted = (0, os.geteuid(), os.lstat("/").st_uid)  # the last is how such a namespace shows root
    for place, status in _steps(path):
        if parent is not None:
            mode = stat.S_IMODE(parent[1].st_mode)
            if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:  # the sticky bit keeps others from it
                facts.append(f"any account may replace what is in {parent[0]} (mode {mode:04o})")
        if status is None:
            if parent is not None and parent[1].st_mode & stat.S_IWOTH:
                facts.append(f"{place} does not exist, and any account may make it first")
            break
        is_open = parent is not None and parent[1].st_mode & stat.S_IWOTH
        if status.st_uid not in trusted[: 2 if is_open else 3]:
            facts.append(f"{place} belongs to {_account(status.st_uid)}")
        parent = None if stat.S_ISLNK(status.st_mode) else (place, status)
    else:
        if status is not None and status.st_mode & (stat.S_IRWXO if reading else stat.S_IWOTH):
            mode = stat.S_IMODE(status.st_mode)
            what = "write into" if mode & stat.S_IWOTH else "read"
            facts.append(f"any account may {what} {place} (mode {mode:04o})")
    return "; ".join(dict.fromkeys(facts)) or None


def _steps(path: Path) -> Iterator[tuple[Path, os.stat_result | None]]:
    """All that a lookup passes, folders and links, in order; the first that does not exist ends with None."""
    here = Path("/")
    yield here, os.lstat(here)
    names = list(reversed(path.absolute().parts[1:]))
    links = 0
    while names:
        name = names.pop()
        if name == "..":
            here = here.parent
            continue
        place = here / name
        try:
            status = os.lstat(place)
            target = Path(os.readlink(place)) if stat.S_ISLNK(status.st_mode) else None
        except OSError:  # missing, or below a folder that this account may not enter
            yield place, None
            return
        yield place, status
        if target is None:
            here = place
            continue
        links += 1
        if links > _MOST_LINKS:
            return
        here = Path("/") if target.is_absolute() else here
        names += reversed(target.parts[target.is_absolute() :])


def _account(uid: int) -> str:
    try:
        return f"account {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"account {uid}"


def replace_file(path: Path, text: str) -> None:
    """Write a file atomically: a reader gets the old text or the new text, never a part."""
    beside(path).write_text(text, "utf-8")
    beside(path).replace(path.resolve())


def beside(path: Path) -> Path:
    """The file that is renamed to `path` once it is complete; a link stays a link."""
    real = path.resolve()
    return real.with_name(f"{real.name}.new")
