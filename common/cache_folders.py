"""Cache folders: where this user keeps what was converted or compiled, for the next start.

What lies there is run and served, so nobody else may write to it, whatever the umask.
"""

import os
import stat
from pathlib import Path


def cache_folder(name: str) -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tokenfleet" / name


def make_cache_folder(name: str) -> Path:
    """Return the folder, which is there then. Raises OSError."""
    folder = cache_folder(name)
    for path in (folder.parent, folder):
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.stat()
        if found.st_uid == os.geteuid() and found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            path.chmod(stat.S_IMODE(found.st_mode) & ~(stat.S_IWGRP | stat.S_IWOTH))
    return folder
