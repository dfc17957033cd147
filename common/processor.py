"""What this machine's processor has."""

import os
from pathlib import Path

BFLOAT16 = {"avx512_bf16", "amx_bf16", "bf16"}  # Intel and AMD; Arm


def has_bfloat16() -> bool:
    """Whether it multiplies bfloat16 by itself; else float32 is faster."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return False
    named = (line.partition(":")[2].split() for line in lines if line.lower().startswith(("flags", "features")))
    return any(BFLOAT16 & set(flags) for flags in named)


def num_cores() -> int:
    """That this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
