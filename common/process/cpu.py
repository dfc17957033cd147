"""CPU: features of this machine's processor that matter to kernels."""

import os
import platform
from pathlib import Path

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


def num_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
