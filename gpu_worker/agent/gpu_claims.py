"""GPU claims: locks that keep workers on one machine, or in containers that share a folder, from taking the
same GPU.
"""

import contextlib
import fcntl
import os
from pathlib import Path
from typing import IO

from common.process.logs import plural
from common.process.machine import list_gpus
from common.settings.settings import SettingError, Settings


def visible_gpus() -> list[str]:
    """UUIDs of the GPUs that CUDA_VISIBLE_DEVICES (indexes or UUIDs) allows; none without a driver."""
    known = [gpu.uuid for gpu in list_gpus()]
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not known or chosen is None:
        return known
    names = [name.strip() for name in chosen.split(",") if name.strip()]
    return [known[int(name)] if name.isdecimal() and int(name) < len(known) else name for name in names]


def num_ranks(settings: Settings) -> int:
    """Return how many ranks run the model together. Raises SettingError."""
    if settings.num_shard is None and settings.sharded:
        stages, count = settings.pipeline_parallel_size, len(usable_gpus(settings)) * settings.nnodes
        if count >= max(2, stages):
            return count - count % stages
        raise SettingError(
            "sharded",
            f"true, but this worker sees {plural(count, 'GPU')}; NUM_SHARD says how many ranks run without",
        )
    return settings.num_ranks


def usable_gpus(settings: Settings) -> list[str]:
    return visible_gpus() if settings.device != "cpu" else []


def claim(settings: Settings, count: int) -> dict[str, IO[str]]:
    """Claim `count` GPUs → the lock of each by its UUID; a lock holds as long as its file is open. Empty on a
    machine without GPUs.

    Workers that take only a part of a GPU's memory (CUDA_MEMORY_FRACTION) share the GPU, as many as fit.

    Raises:
        SettingError: too few GPUs are left, or the locks cannot be taken.
    """
    gpus = usable_gpus(settings)
    if not gpus:
        return {}  # with DEVICE=cuda the engine reports the fault
    if count > len(gpus):
        here = " on each machine (NNODES)" if settings.nnodes > 1 else ""
        cause = f"{here}, but this worker sees {plural(len(gpus), 'GPU')}"
        if (stages := settings.pipeline_parallel_size) > 1:
            raise SettingError(
                "pipeline_parallel_size", f"{stages}, which makes {plural(count, 'rank')}{cause}"
            )
        raise SettingError("num_shard", f"{count}{cause}")
    folder = Path(settings.gpu_locks)
    held: dict[str, IO[str]] = {}
    for place in range(int(1 / settings.cuda_memory_fraction)):
        for gpu in gpus:
            if (
                len(held) < count
                and gpu not in held
                and (lock := lock_file(folder / f"{gpu}.{place}")) is not None
            ):
                held[gpu] = lock
    if len(held) == count:
        return held
    for lock in held.values():
        lock.close()
    taken = f"{len(gpus) - len(held)} of {plural(len(gpus), 'GPU')}"
    raise SettingError("device", f"other workers of this machine hold {taken} (locks in {folder})")


def lock_file(path: Path) -> IO[str] | None:
    """Lock a file → the open file, or None if another process holds the lock. The system releases the lock
    when its process ends. Raises SettingError.
    """
    try:
        make_lock(path)
        file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK))
    except OSError as error:
        raise SettingError("gpu_locks", f"{path} cannot be used as a lock: {error.strerror}") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file


def make_lock(path: Path) -> None:
    """Make a file that every user of this machine may lock, and its folder, unless they exist. A symbolic
    link is not followed. Raises OSError.
    """
    if not path.parent.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.parent.chmod(0o1777)
    with contextlib.suppress(FileExistsError):
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        os.fchmod(handle, 0o644)
        os.close(handle)
