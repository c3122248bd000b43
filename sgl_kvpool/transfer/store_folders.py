"""Folders in which SGLang's stores keep pages as files, and whether other accounts can reach them.

Checksums do not reveal forged pages, because their seed can be computed.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sgl_kvpool.folders import exposure, make_private
from sgl_kvpool.refusal import Refusal, shown


@dataclass(frozen=True)
class FileStore:
    """A store of SGLang's that keeps pages as files, in folders that `variable` names."""

    variable: str
    default: str

    def folders(self, configuration: Mapping[str, Any] | None = None) -> list[Path]:
        """Its folders, with a --hicache-storage-backend-extra-config; none if it keeps objects elsewhere."""
        configuration = configuration or {}
        if self is FILE_STORES["file"]:
            path = os.environ.get(self.variable) or configuration.get("file_storage_path") or self.default
            if not isinstance(path, str) or "\0" in path:
                of = "of --hicache-storage-backend-extra-config"
                raise Refusal(f'"file_storage_path" {of} is no path but {shown(path)}; give one')
            return [Path(path)]
        plugin = os.environ.get("SGLANG_HICACHE_NIXL_BACKEND_PLUGIN", "")
        if "plugin" in configuration:
            plugins, yes = configuration["plugin"], (True, "true", "True")
            try:  # SGLang takes the first that is active
                plugin = next(name for name, item in plugins.items() if item.get("active") in yes).upper()
            except (AttributeError, StopIteration):
                found = ", ".join(map(str, plugins)) if isinstance(plugins, dict) else type(plugins).__name__
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
        make_private(folder, self.variable, " of the store")

    def warning(self, folder: Path) -> str | None:
        """Warning about a folder that other accounts can reach, and what to change; None if they cannot."""
        if (facts := exposure(folder)) is None:
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
