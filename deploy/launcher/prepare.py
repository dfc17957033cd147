"""Checks: what must hold before a process starts, and the settings with the model found. A failure is a
SettingError: one line with the setting and the cause.
"""

import asyncio
import contextlib
import errno
import http.client
import ipaddress
import json
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from common import model_files
from common.broker import client
from common.model_files import context_length, read_other_tokenizer
from common.process import machine
from common.rank import follows, is_spread, launcher_of
from common.settings.settings import SettingError, Settings

log = logging.getLogger(__name__)

MIB = 2**20
POLL_S = 0.5
ASK_S = 2.0
MAX_METADATA_BYTES = 65_536
NVIDIA = Path("/dev/nvidiactl")
"""Exists where NVIDIA's driver is loaded."""
OTHER_DRIVERS = (Path("/dev/dxg"), Path("/dev/kfd"))
"""Where torch may find a GPU without that: Windows' driver under WSL, and AMD's."""
KINDS_WITH_MODEL = ("gateway", "worker")
"""Kinds of processes that read files of the model."""


@contextlib.contextmanager
def progress(as_json: bool = False) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows the current step, such as a download. A terminal gets one live line with
    the time; elsewhere each step is a line, with `as_json` a line of the log.
    """
    console = Console(stderr=True)
    if as_json:
        yield log.info
        return
    if not console.is_terminal:
        yield lambda text: print(text, file=sys.stderr, flush=True)
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as live:
        task = live.add_task("", visible=False)
        yield lambda text: live.reset(task, description=text, visible=True)


def caches_on_gpu(settings: Settings) -> bool:
    return settings.device == "cuda" or (settings.device == "auto" and NVIDIA.exists())


def weights_dtype(settings: Settings) -> str:
    """Return DTYPE, with `auto` replaced by what workers here will choose. Does not import torch."""
    if settings.dtype != "auto" or caches_on_gpu(settings) or machine.has_bfloat16():
        return settings.dtype
    return "float32"


def check_memory(settings: Settings) -> None:
    """Check that the caches of all workers fit in memory together. A worker alone cannot see this, because
    the system hands out memory page by page, as it is used.
    """
    if caches_on_gpu(settings):
        return  # each worker checks its own GPU
    available_bytes = machine.available_bytes()
    if settings.num_workers * settings.cpu_cache_bytes > available_bytes:
        wanted = f"{settings.cpu_cache_bytes // MIB} MiB for each of {settings.num_workers} (NUM_WORKERS)"
        raise SettingError(
            "kv_cache_bytes", f"{wanted}, but only {available_bytes // MIB} MiB of memory are available"
        )


def check_ranks(settings: Settings) -> None:
    """Check that the worker of this fleet is the one whose ranks run on several machines. Raises
    SettingError.
    """
    if launcher_of(os.environ):
        raise SettingError(
            "world_size",
            "is set by torchrun, MPI or Slurm, which start `tokenfleet worker`, not fleets: set NUM_SHARD",
        )
    if settings.nnodes > 1 and settings.node_rank:
        raise SettingError(
            "node_rank", f"{settings.node_rank}: a fleet runs on machine 0; start `tokenfleet worker` here"
        )
    if settings.nnodes > 1 and settings.num_workers > 1:
        raise SettingError(
            "num_workers", f"{settings.num_workers}, but only one worker may run on several machines (NNODES)"
        )


def check_device(settings: Settings) -> None:
    """Check that DEVICE=cuda has a driver, before a model is loaded or converted for it. Raises
    SettingError.
    """
    if settings.device == "cuda" and not any(path.exists() for path in (NVIDIA, *OTHER_DRIVERS)):
        raise SettingError("device", "cuda, but this machine has no driver of a GPU")


def check_workers(settings: Settings) -> None:
    """Check that a fleet without workers has a broker that workers elsewhere reach. Raises SettingError."""
    if settings.redis_url is None and not settings.num_workers:
        raise SettingError("num_workers", "0, but no worker elsewhere reaches this fleet: set REDIS_URL")


class TakenByFleet(SettingError):
    """A port at which a gateway answers."""


def check_port(settings: Settings) -> None:
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
            if is_fleet(settings):
                raise TakenByFleet("port", f"{host}:{port} is taken by a fleet that runs already") from error
            raise SettingError("port", f"{host}:{port} is taken by another process") from error
        name = "port" if error.errno == errno.EACCES else "hostname"
        raise SettingError(name, f"cannot listen on {host}:{port}: {error.strerror}") from error


def is_fleet(settings: Settings) -> bool:
    """Whether a gateway answers at the settings' port. Its metadata need no key."""
    connection = http.client.HTTPConnection(*local_address(settings), timeout=ASK_S)
    with contextlib.suppress(OSError, ValueError, http.client.HTTPException):
        connection.request("GET", "/v2")
        found = json.loads(connection.getresponse().read(MAX_METADATA_BYTES))
        return isinstance(found, dict) and found.get("name") == "tokenfleet"
    return False


def check_broker(settings: Settings, *kinds: str) -> str:
    """Check the broker and the rights that these kinds of processes need there. Returns what the broker would
    lose at its end; empty if that is nothing. Raises SettingError.
    """
    return asyncio.run(client.check_broker(client.broker_url(settings), kinds, settings.pools))


def warn_of_broker(settings: Settings, *kinds: str) -> None:
    """Check the broker as `check_broker`, and log what it would lose at its end. Raises SettingError."""
    if warning := check_broker(settings, *kinds):
        log.warning("REDIS_URL: %s", warning)


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


def with_model(settings: Settings) -> Settings:
    """Find the model and its tokenizer, download or convert them where needed, and return the settings with
    their directories: no other process has to look for them again.
    """
    set_hub_variables(settings)
    with progress(settings.json_output) as show:
        path = model_files.resolve(
            settings.model_id,
            settings.revision,
            show,
            weightless=settings.makes_weights,
            dtype=weights_dtype(settings),
        )
        own = model_files.find_tokenizer(settings.tokenizer_name, path, show, weights_dtype(settings))
    check_context(settings, path)
    changed: dict[str, Any] = {"model_id": os.fspath(path)}
    if settings.tokenizer_name is not None:
        read_other_tokenizer(own, path)  # refuses one that does not fit
        changed["tokenizer_name"] = os.fspath(own)
    if settings.models:
        others = (settings.of_pool(pool) for pool in settings.other_models)
        changed["models"] = tuple(f"{other.pool}={find_other(other)}" for other in others)
    names = tuple(dict.fromkeys((*settings.served_model_name, settings.model_id)))
    return settings.model_copy(update=changed | {"served_model_name": names})


def find_other(settings: Settings) -> Path:
    """Find the model of another pool, download or convert it where needed. Raises SettingError of MODELS."""
    dtype = weights_dtype(settings)
    try:
        with progress(settings.json_output) as show:
            path = model_files.resolve(
                settings.model_id, None, show, weightless=settings.makes_weights, dtype=dtype
            )
            return model_files.find_tokenizer(None, path, show, dtype)
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
    if kind == "worker":
        check_device(settings)
    if kind == "worker" and is_spread(settings, os.environ):
        set_hub_variables(settings)
        if not follows(settings, os.environ):
            warn_of_broker(settings, kind)
        return settings
    warn_of_broker(settings, kind)
    if kind == "gateway":
        say_access(settings)
    return wait_for_model(settings) if kind in KINDS_WITH_MODEL else settings


def say_access(settings: Settings) -> None:
    """Log who may send requests; a warning, if that is everybody who reaches this machine."""
    log.info("%s", describe_access(settings))
    if not settings.has_keys and not ipaddress.ip_address(settings.listen_host).is_loopback:
        log.warning(
            "everybody who reaches %s:%d may use this fleet, unless it has keys (docs/keys.md): set API_KEY, "
            "or HOSTNAME=127.0.0.1 for this machine alone (docs/security.md)",
            settings.listen_host,
            settings.port,
        )


def describe_access(settings: Settings) -> str:
    """Say who may send requests, without the key itself."""
    key = "must carry the key in API_KEY" if settings.api_key else "need no key (API_KEY is not set)"
    if settings.api_keys_file:
        key = "must carry a key of API_KEYS_FILE" + (", or API_KEY" if settings.api_key else "")
    return f"requests {key}; of web pages, {describe_pages(settings)} may send them (CORS_ALLOW_ORIGIN)"


def describe_pages(settings: Settings) -> str:
    """Say which web pages may send requests."""
    if "*" in settings.cors_allow_origin or (settings.has_keys and not settings.cors_allow_origin):
        return "any"
    named = " and ".join(settings.cors_allow_origin) or "those of this machine"
    return f"only the fleet's own and {named}"


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
