"""Checks of this machine: what can compute here, and with which libraries and compilers."""

import os
import platform
import shutil
import sys
import sysconfig
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from common.process import cpu
from common.process.gpu import list_gpus
from common.settings.settings import Settings
from deploy.doctor.finding import Finding
from deploy.serve import checks

PYTHONS = ((3, 11), (3, 13))
COMPILERS = ("c++", "g++", "clang++")
CUDA = Path("/usr/local/cuda")
"""Where FlashInfer looks for the CUDA toolkit when CUDA_HOME is not set and nvcc is not in PATH."""
HEADERS = Path(sysconfig.get_path("include"))
"""Where this Python's headers are, if they are installed."""


def check_python(_: Settings) -> Finding:
    found = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    found += f", tokenfleet {version('tokenfleet')}"
    if not PYTHONS[0] <= sys.version_info[:2] <= PYTHONS[1]:
        return Finding("warn", found, "use Python 3.11 to 3.13, which this is tested with")
    return Finding("ok", found)


def check_torch(_: Settings) -> Finding:
    """Look at the installed version only: importing torch takes seconds."""
    try:
        build = version("torch")
        found = f"torch {build}, transformers {version('transformers')}"
    except PackageNotFoundError as error:
        return Finding(
            "warn",
            f"{error.name} is not installed: gateways and batchers can run here, workers cannot",
            "pip install -e '.[worker]'",
        )
    if checks.NVIDIA.exists() and build.endswith("+cpu"):
        return Finding(
            "warn",
            f"{found} is built for CPU only, and this machine has a GPU",
            "pip install a torch with CUDA from pytorch.org",
        )
    return Finding("ok", found)


def check_gpu(settings: Settings) -> Finding:
    found = [f"{gpu.name}, {gpu.memory_bytes // checks.MIB} MiB, {gpu.driver}" for gpu in list_gpus()]
    if found:
        return Finding("ok", "; ".join(found))
    if checks.NVIDIA.exists():
        return Finding(
            "warn", "there is a GPU, but its driver does not answer", "look at `nvidia-smi` and `dmesg`"
        )
    if settings.device == "cuda":
        return Finding("fail", "no NVIDIA driver, but DEVICE=cuda", "install the driver, or set DEVICE=auto")
    return Finding("ok", "no GPU: workers compute on the CPU")


def check_bfloat16(settings: Settings) -> Finding:
    if checks.NVIDIA.exists() and settings.device != "cpu":
        return Finding("ok", "depends on the GPU")
    if cpu.has_bfloat16():
        return Finding("ok", f"supported by this processor ({cpu.num_cores()} cores)")
    if settings.dtype in ("bfloat16", "float16"):
        return Finding(
            "warn",
            f"not supported by this processor: {settings.dtype} is slow",
            "set DTYPE=float32 or DTYPE=auto",
        )
    return Finding("ok", f"not supported by this processor, so weights are float32 ({cpu.num_cores()} cores)")


def check_compiler(_: Settings) -> Finding:
    path = next((path for name in COMPILERS if (path := shutil.which(name))), None)
    if path is None:
        return Finding(
            "warn",
            "no C++ compiler: our CPU kernels cannot be built, and torch's attention is slower",
            "install a C++ compiler, such as g++",
        )
    return Finding("ok", path)


def check_kernels(settings: Settings) -> Finding:
    """Check what the engine needs, besides torch, to be fast on a GPU."""
    if not checks.NVIDIA.exists() or settings.device == "cpu":
        return Finding("ok", "none needed without a GPU")
    try:
        found = f"FlashInfer {version('flashinfer-python')}"
    except PackageNotFoundError:
        return Finding(
            "warn",
            "FlashInfer is not installed: torch's attention is used on the GPU, which is slower",
            "pip install -e '.[cuda]'",
        )
    nvcc = find_nvcc()
    if nvcc is None:
        fix = (
            "install the CUDA toolkit that torch is built for, "
            "and set CUDA_HOME if nvcc is neither in PATH nor in /usr/local/cuda/bin"
        )
        return Finding("fail", f"{found} has no nvcc to compile its kernels with", fix)
    if not any(map(shutil.which, COMPILERS)):
        return Finding(
            "fail",
            f"{found} and Triton have no C++ compiler beside nvcc",
            "install a C++ compiler, such as g++",
        )
    if not (HEADERS / "Python.h").exists():
        return Finding(
            "fail",
            f"Triton, which comes with torch, has no {HEADERS}/Python.h to compile what launches its kernels",
            "install Python's headers, such as python3-dev",
        )
    return Finding("ok", f"{found}, compiled by {nvcc}")


def find_nvcc() -> str | None:
    """Find nvcc as FlashInfer does."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home:
        return shutil.which("nvcc", path=f"{home}/bin")
    return shutil.which("nvcc") or shutil.which("nvcc", path=f"{CUDA}/bin")
