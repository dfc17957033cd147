"""How much memory this process may still take: of the machine's, and of what its control groups leave of
theirs (a container's limit).
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

LIMITS = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Names in version 2 and version 1 of control groups: the limit, what is used, and how much of that is cache
that yields.
"""


def available_bytes(root: Path = Path("/")) -> int:
    return min([machine_bytes(root), *(left for folder in groups(root) for left in group_bytes(folder))])


def machine_bytes(root: Path) -> int:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


def groups(root: Path) -> Iterator[Path]:
    """Folders of our control groups and of all above them. A container sees its own group as the topmost."""
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers in ("", "memory"):
                inside = Path(controllers) / path.lstrip("/")
                yield from (root / "sys/fs/cgroup" / folder for folder in (inside, *inside.parents))


def group_bytes(folder: Path) -> Iterator[int]:
    for limit, used, cache in LIMITS:
        with contextlib.suppress(OSError, ValueError):  # another version; or `max`, which is no limit
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            left = (
                int((folder / limit).read_text()) - int((folder / used).read_text()) + int(stat.get(cache, 0))
            )
            yield max(0, left)
