"""Family: a process and all that it has started, as a worker and its engine, by what /proc says."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

PROC = Path("/proc")
ENDS_FIRST = 1000
"""Memory score of whom the kernel ends before all others when memory runs out."""


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


def memory_score() -> int:
    """Our own `oom_score_adj`, which those that we start have, too."""
    with contextlib.suppress(OSError):
        return int((PROC / "self" / "oom_score_adj").read_text())
    return 0


def score_memory(pid: int, score: int) -> None:
    """Give a process and all that it has started, or will start, a memory score; on Linux."""
    for member in family(pid):
        with contextlib.suppress(OSError):
            (PROC / str(member) / "oom_score_adj").write_text(str(score))
