"""CPU: features of this machine's processor that matter to kernels."""

import contextlib
import os
import platform
from collections.abc import Iterator
from pathlib import Path

from common.process.control_groups import folders

INFO = Path("/proc/cpuinfo")
BFLOAT16 = {"avx512_bf16", "amx_bf16", "bf16"}  # Intel and AMD; Arm


def has_bfloat16() -> bool:
    """Whether it has instructions for bfloat16; without them float32 is faster."""
    return bool(BFLOAT16 & set(features().split()))


def prefers_widened_bfloat16() -> bool:
    """Whether bfloat16 is multiplied faster when widened to float32 than by its own instruction, in pairs.

    Measured: Intel's instruction (Sapphire Rapids) takes four times as long as the one for float32, which
    multiplies half as many numbers; AMD's takes no longer. Intel's matrix unit (AMX) is left to oneDNN, whose
    sums of a row depend on the batch.
    """
    return read_field("vendor_id") == "GenuineIntel"


def features() -> str:
    return read_field("flags", "features") or platform.processor()


def read_field(*names: str) -> str:
    """Return the first core's entry in /proc/cpuinfo under one of these names, or ''."""
    lines = INFO.read_text().splitlines() if INFO.exists() else []
    pairs = (line.partition(":") for line in lines)
    return next((value.strip() for name, _, value in pairs if name.strip().lower() in names), "")


def num_cores(root: Path = Path("/")) -> int:
    """Cores that this process may run on, by its affinity and by each control group's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = (quota for folder in folders("cpu", root) for quota in group_cores(folder))
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
