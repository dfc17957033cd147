"""Which GPU is ours: workers of one machine, or containers that share a folder, never land on the same one by accident."""

import fcntl
import os
import subprocess
from pathlib import Path
from typing import IO

from common.settings import SettingError, Settings

QUERY = ("nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader")


def visible() -> list[str]:
    """GPUs by UUID, those that CUDA_VISIBLE_DEVICES (places or UUIDs) leaves; none where there is no driver."""
    try:
        known = subprocess.run(QUERY, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, timeout=30).stdout.split()
    except (OSError, subprocess.TimeoutExpired):
        return []
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return known
    names = [name.strip() for name in chosen.split(",") if name.strip()]
    return [known[int(name)] if name.isdecimal() and int(name) < len(known) else name for name in names]


def claim(settings: Settings) -> tuple[str, IO[str]] | None:
    """The UUID of a GPU that no other worker holds, and the lock that keeps it while it is open. None where there is no GPU to use.

    Workers that take only a part of a GPU's memory (CUDA_MEMORY_FRACTION) share it, as many as there is room for.

    Raises:
        SettingError: every GPU is held.
    """
    gpus = visible() if settings.device != "cpu" else []
    if not gpus:
        return None  # the engine says what is wrong, where DEVICE=cuda
    folder = Path(settings.gpu_locks)
    folder.mkdir(parents=True, exist_ok=True)
    for place in range(int(1 / settings.cuda_memory_fraction)):
        for gpu in gpus:
            if (lock := hold(folder / f"{gpu}.{place}")) is not None:
                return gpu, lock
    raise SettingError("device", f"all {len(gpus)} GPUs are held by other workers of this machine (locks in {folder})")


def hold(path: Path) -> IO[str] | None:
    """The lock on a file, or None where another process has it. It goes when that process ends, however it ends."""
    file = path.open("a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file
