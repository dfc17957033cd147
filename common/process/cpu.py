"""What this machine's processor has."""

import os
import platform
from pathlib import Path

INFO = Path("/proc/cpuinfo")
BFLOAT16 = {"avx512_bf16", "amx_bf16", "bf16"}  # Intel and AMD; Arm


def has_bfloat16() -> bool:
    """Whether it multiplies bfloat16 by itself; else float32 is faster."""
    return bool(BFLOAT16 & set(features().split()))


def prefers_widened_bfloat16() -> bool:
    """Whether it takes less time to multiply bfloat16 as float32, widened, than by its own instruction for
    pairs of them. Measured: Intel's (Sapphire Rapids) takes four times as long as one for float32, which
    multiplies half as many; AMD's takes no longer. Where there is a matrix unit, pairs are for that.
    """
    return read_field("vendor_id") == "GenuineIntel" and "amx_bf16" not in features().split()


def features() -> str:
    return read_field("flags", "features") or platform.processor()


def read_field(*names: str) -> str:
    """What the system tells of the first core under one of these names."""
    lines = INFO.read_text().splitlines() if INFO.exists() else []
    pairs = (line.partition(":") for line in lines)
    return next((value.strip() for name, _, value in pairs if name.strip().lower() in names), "")


def num_cores() -> int:
    """That this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
