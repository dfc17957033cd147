"""Memory: how much this process may still allocate, by the machine and by its control groups (containers)."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from common.process.control_groups import folders

LIMITS = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""(limit, used, reclaimable cache) in version 2 and in version 1 of control groups."""


def available_bytes(root: Path = Path("/")) -> int:
    """Return the smallest of what the machine and each control group leave."""
    groups = folders("memory", root)
    return min([machine_bytes(root), *(left for folder in groups for left in group_bytes(folder))])


def machine_bytes(root: Path) -> int:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


def group_bytes(folder: Path) -> Iterator[int]:
    for limit, used, cache in LIMITS:
        with contextlib.suppress(OSError, ValueError):  # another version, or `max`: no limit
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            left = (
                int((folder / limit).read_text()) - int((folder / used).read_text()) + int(stat.get(cache, 0))
            )
            yield max(0, left)
