"""Prints what a report must say of the machine: `python -m benchmarks.gpu.machine [PEER_PYTHON]`."""

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

import torch

PACKAGES = ("torch", "triton", "flashinfer-python", "transformers", "xgrammar", "llguidance", "numpy")
GPU_FIELDS = ["name", "driver_version", "memory.total", "memory.used"]
GPU_FIELDS += ["clocks.max.sm", "power.limit", "mig.mode.current"]
NOT_INSTALLED = "not installed"


def output_of(*command: str) -> str:
    """Returns the last line that a command prints, or why there is none."""
    if shutil.which(command[0]) is None:
        return NOT_INSTALLED
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except subprocess.TimeoutExpired:
        return "no answer in 60 s"
    lines = (done.stdout or done.stderr).strip().splitlines() or ["no output"]
    return lines[-1] if done.returncode == 0 else f"exit status {done.returncode}: {lines[-1]}"


def installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return NOT_INSTALLED


def processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def facts(peer_python: str) -> Iterator[tuple[str, str]]:
    yield "date", output_of("date", "-u", "+%F %T UTC")
    yield "commit", output_of("git", "log", "-1", "--format=%h %s")
    for field in GPU_FIELDS if shutil.which("nvidia-smi") else ():
        yield f"GPU {field}", output_of("nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader")
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        yield "GPUs that torch sees", str(torch.cuda.device_count())
        yield "multiprocessors", str(properties.multi_processor_count)
        yield "compute capability", f"{properties.major}.{properties.minor}"
    else:
        yield "GPUs that torch sees", "none"
    yield "CUDA of torch", str(torch.version.cuda)
    yield "nvcc", output_of("nvcc", "--version")
    yield "processor", f"{processor()}, {os.cpu_count()} cores"
    yield "kernel", platform.platform()
    yield "Python", platform.python_version()
    for name in PACKAGES:
        yield name, installed(name)
    vllm = (
        "import importlib.metadata as m, importlib.util as u\n"
        f"print(m.version('vllm') if u.find_spec('vllm') else {NOT_INSTALLED!r})"
    )
    yield "vLLM", output_of(peer_python, "-c", vllm)


if __name__ == "__main__":
    for name, value in facts(sys.argv[1] if len(sys.argv) > 1 else sys.executable):
        print(f"{name}: {value}", flush=True)
