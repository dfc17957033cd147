"""Machine: what Linux and NVIDIA's driver say of processor, memory and GPUs, and of a process's run delay.

Also the C++ compiler, and the folders of what is kept for the next start. Control groups are the folders in
which Linux shows the limits of this process and of its container.
"""

import contextlib
import ctypes
import functools
import os
import platform
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

INFO = Path("/proc/cpuinfo")
BFLOAT16 = {"avx512_bf16", "amx_bf16", "bf16"}  # Intel and AMD; Arm
ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA = 158, 0x1023, 18
"""A system call of x86-64, and its arguments (linux/Documentation/arch/x86/xstate.rst)."""
MEMORY_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""(limit, used, reclaimable cache) in version 2 and in version 1 of control groups."""


def group_folders(controller: str, root: Path) -> Iterator[Path]:
    """Yield the folders of this process's control groups and of those above, up to its container's."""
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers or controller in controllers.split(","):
                inside = Path(controllers) / path.lstrip("/")
                yield from (root / "sys/fs/cgroup" / folder for folder in (inside, *inside.parents))


def has_bfloat16() -> bool:
    """Whether the processor has instructions for bfloat16; without them float32 is faster."""
    return bool(BFLOAT16 & set(features().split()))


def prefers_widened_bfloat16() -> bool:
    """Whether bfloat16 is multiplied faster when widened to float32 than by its own instruction, in pairs.

    Measured: Intel's instruction (Sapphire Rapids) takes four times as long as the one for float32, which
    multiplies half as many numbers; AMD's takes no longer. This is said of vectors; the matrix unit (AMX) is
    faster than both.
    """
    return read_field("vendor_id") == "GenuineIntel"


@functools.cache
def permits_tiles() -> bool:
    """Ask Linux to let this process use Intel's matrix unit (AMX), and return whether it may.

    The permission is for all threads of the process.
    """
    if "amx_bf16" not in features().split():
        return False
    return bool(ctypes.CDLL(None).syscall(ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0)


def features() -> str:
    return read_field("flags", "features") or platform.processor()


def read_field(*names: str) -> str:
    """Return the first core's entry in /proc/cpuinfo under one of these names, or ''."""
    lines = INFO.read_text().splitlines() if INFO.exists() else []
    pairs = (line.partition(":") for line in lines)
    return next((value.strip() for name, _, value in pairs if name.strip().lower() in names), "")


def num_cores(root: Path = Path("/")) -> int:
    """Return the number of cores that this process may run on, by its affinity and by each control group's
    quota.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = (quota for folder in group_folders("cpu", root) for quota in group_cores(folder))
    return max(1, min([cores, *quotas]))


def group_cores(folder: Path) -> Iterator[int]:
    """Yield a control group's quota in whole cores, in version 2 and in version 1."""
    with contextlib.suppress(OSError, ValueError):  # another version, or `max`: no quota
        quota, period = (folder / "cpu.max").read_text().split()
        yield int(quota) // int(period)
    with contextlib.suppress(OSError):
        quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        if int(quota) > 0:  # -1: none
            yield int(quota) // int(period)


def available_bytes(root: Path = Path("/")) -> int:
    """Return the smallest of what the machine and each control group leave."""
    groups = group_folders("memory", root)
    return min([machine_bytes(root), *(left for folder in groups for left in group_bytes(folder))])


def machine_bytes(root: Path) -> int:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


def group_bytes(folder: Path) -> Iterator[int]:
    for limit, used, cache in MEMORY_FILES:
        with contextlib.suppress(OSError, ValueError):  # another version, or `max`: no limit
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            left = (
                int((folder / limit).read_text()) - int((folder / used).read_text()) + int(stat.get(cache, 0))
            )
            yield max(0, left)


def return_memory() -> None:
    """Give the system what is free; glibc, alone of libraries, would keep it for the threads that had it."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


class Gpu(NamedTuple):
    uuid: str
    name: str
    memory_bytes: int
    driver: str


def list_gpus() -> list[Gpu]:
    """Return the GPUs in the order of the PCI bus; none if there is no driver, or it fails."""
    import pynvml  # this module needs no installed package

    with contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        try:
            driver = pynvml.nvmlSystemGetDriverVersion()
            handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
            return [
                Gpu(
                    pynvml.nvmlDeviceGetUUID(handle),
                    pynvml.nvmlDeviceGetName(handle),
                    pynvml.nvmlDeviceGetMemoryInfo(handle).total,
                    driver,
                )
                for handle in handles
            ]
        finally:
            pynvml.nvmlShutdown()
    return []


def visible_gpus() -> list[str]:
    """UUIDs of the GPUs that CUDA_VISIBLE_DEVICES (indexes or UUIDs) allows; none without a driver."""
    known = [gpu.uuid for gpu in list_gpus()]
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not known or chosen is None:
        return known
    names = [name.strip() for name in chosen.split(",") if name.strip()]
    return [known[int(name)] if name.isdecimal() and int(name) < len(known) else name for name in names]


def run_delay_s(pid: int) -> float:
    """Return how long the threads of a process have waited for a core although they could run, in sum.

    It is 0 where the kernel does not count it.
    """
    return sum(read_delay_ns(path) for path in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


def read_delay_ns(path: Path) -> int:
    """Return the second number of a thread's schedstat; 0 if the thread has ended."""
    try:
        return int(path.read_text().split()[1])
    except (OSError, IndexError):
        return 0


def cache_folder(name: str) -> Path:
    """Return the folder of files that this user has converted or compiled, for the next start."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tokenfleet" / name


def make_cache_folder(name: str) -> Path:
    """Create a cache folder, and return it. Raises OSError."""
    folder = cache_folder(name)
    for path in (folder.parent, folder):
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.stat()
        if found.st_uid == os.geteuid() and found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            path.chmod(stat.S_IMODE(found.st_mode) & ~(stat.S_IWGRP | stat.S_IWOTH))
    return folder


COMPILERS = ("c++", "g++", "clang++")


def find_compiler() -> str | None:
    return next((name for name in COMPILERS if shutil.which(name)), None)
