"""Control groups: the folders in which Linux shows the limits of this process and of its container."""

import contextlib
from collections.abc import Iterator
from pathlib import Path


def folders(controller: str, root: Path) -> Iterator[Path]:
    """Yield those of our groups and of all above. A container sees its own as the topmost."""
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers or controller in controllers.split(","):
                inside = Path(controllers) / path.lstrip("/")
                yield from (root / "sys/fs/cgroup" / folder for folder in (inside, *inside.parents))
