"""Which GPUs are ours: workers of one machine, or containers that share a folder, never land on the same one
by accident.
"""

import fcntl
import os
import subprocess
from pathlib import Path
from typing import IO

from common.settings.settings import SettingError, Settings

QUERY = ("nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader")


def visible() -> list[str]:
    """GPUs by UUID, those that CUDA_VISIBLE_DEVICES (places or UUIDs) leaves; none where there is no driver."""
    try:
        answer = subprocess.run(
            QUERY, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):  # without a driver it complains on stdout
        return []
    known = answer.stdout.split()
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return known
    names = [name.strip() for name in chosen.split(",") if name.strip()]
    return [known[int(name)] if name.isdecimal() and int(name) < len(known) else name for name in names]


def num_ranks(settings: Settings) -> int:
    """How many run one model together. Raises SettingError."""
    if settings.num_shard is None and settings.sharded:
        if (count := len(usable(settings))) > 1:
            return count
        raise SettingError(
            "sharded", f"true, but there are {count} GPUs; NUM_SHARD says how many ranks run without"
        )
    return settings.num_shard or 1


def usable(settings: Settings) -> list[str]:
    return visible() if settings.device != "cpu" else []


def claim(settings: Settings, count: int) -> dict[str, IO[str]]:
    """The UUIDs of `count` GPUs that no other worker holds, with the locks that keep them while these are
    open; none without GPUs.

    Workers that take only a part of a GPU's memory (CUDA_MEMORY_FRACTION) share it, as many as there is room
    for.

    Raises:
        SettingError: too few GPUs are left, or the locks cannot be taken.
    """
    gpus = usable(settings)
    if not gpus:
        return {}  # the engine says what is wrong, where DEVICE=cuda
    if count > len(gpus):
        raise SettingError("num_shard", f"{count}, but there are {len(gpus)} GPUs")
    folder = Path(settings.gpu_locks)
    held: dict[str, IO[str]] = {}
    for place in range(int(1 / settings.cuda_memory_fraction)):
        for gpu in gpus:
            if (
                len(held) < count
                and gpu not in held
                and (lock := hold(folder / f"{gpu}.{place}")) is not None
            ):
                held[gpu] = lock
    if len(held) == count:
        return held
    for lock in held.values():
        lock.close()
    some = "all" if not held else f"{len(gpus) - len(held)} of"
    raise SettingError(
        "device", f"{some} {len(gpus)} GPUs are held by other workers of this machine (locks in {folder})"
    )


def hold(path: Path) -> IO[str] | None:
    """The lock on a file, or None where another process has it. It goes when that process ends, however it
    ends. Raises SettingError.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a")
    except OSError as error:
        raise SettingError("gpu_locks", f"{path} cannot be written to: {error.strerror}") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file
