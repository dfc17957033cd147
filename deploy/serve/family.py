"""Family: a process and all that it has started, as a worker and its engine, by what /proc says."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

PROC = Path("/proc")


def family(pid: int | None) -> Iterator[int]:
    """Process ids, the process itself first; none of None."""
    if pid is None:
        return
    yield pid
    children = b""
    with contextlib.suppress(OSError):  # it has ended, or the kernel does not tell
        children = (PROC / str(pid) / "task" / str(pid) / "children").read_bytes()
    for child in children.split():
        yield from family(int(child))


def resident_bytes(pid: int) -> int:
    """Memory that a process has pages of; 0 where nobody knows."""
    with contextlib.suppress(OSError):
        pages = (PROC / str(pid) / "statm").read_bytes().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")
    return 0
