"""Weight digest: SHA-256 of a model's weight files, computed once a file and kept in the cache folder."""

import contextlib
import hashlib
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from common.model_files import cache_folder, make_cache_folder

DIGESTS = "digests"
"""The cache folder: a file for each weight file as it was when it was read, with its SHA-256."""
IDLE_NICE = 19


def digest_weights(files: Sequence[Path]) -> str:
    """SHA-256 of one file; of several that of their names and digests, a line each, as `sha256sum` writes
    them. Empty for no file. Raises OSError.
    """
    if len(files) == 1:
        return digest_file(files[0])
    lines = [f"{digest_file(file)}  {file.name}\n" for file in files]
    return hashlib.sha256("".join(lines).encode()).hexdigest() if lines else ""


def digest_file(file: Path) -> str:
    """SHA-256 of a file, from the cache while neither its place, size nor time of change differ. Raises
    OSError.
    """
    path, found = file.resolve(), file.stat()
    name = hashlib.sha256(f"{path}\n{found.st_size}\n{found.st_mtime_ns}".encode()).hexdigest()
    kept = cache_folder(DIGESTS) / name
    with contextlib.suppress(OSError):
        if len(text := kept.read_text()) == 64:
            return text
    with path.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    with contextlib.suppress(OSError):  # a cache that cannot be written costs time only
        make_cache_folder(DIGESTS)
        written = kept.with_suffix(f".{os.getpid()}")
        written.write_text(digest)
        written.replace(kept)
    return digest


def yield_to_others() -> None:
    """Let this thread run only where others leave time, where the system can say so of a thread (Linux)."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), IDLE_NICE)
