"""Checks before anything starts. A failure is a SettingError: one line with the setting and the cause.

Progress of the steps before the first process starts, such as a download.
"""

import asyncio
import contextlib
import errno
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from common import model_files
from common.broker import client
from common.process import machine
from common.settings.settings import SettingError, Settings

log = logging.getLogger(__name__)


@contextlib.contextmanager
def progress(as_json: bool = False) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows the current step: in a terminal one live line with the time, elsewhere a
    line for each step, which is one of the log as JSON.
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


MIB = 2**20
POLL_S = 0.5
NVIDIA = Path("/dev/nvidiactl")
WITH_MODEL = ("gateway", "worker")
"""Kinds of processes that read files of the model."""


def read_settings(argv: Sequence[str], prog: str, description: str) -> Settings:
    """Settings of a command that may be given the model without a flag, as its first word. Raises
    SettingError.
    """
    return Settings.read(name_model(argv), prog=f"{prog} [MODEL]", description=description)


def name_model(argv: Sequence[str]) -> list[str]:
    """The words of a command with the flag before the model."""
    return ["--model-id", *argv] if argv and not argv[0].startswith("-") else list(argv)


def caches_on_gpu(settings: Settings) -> bool:
    return settings.device == "cuda" or (settings.device == "auto" and NVIDIA.exists())


def weights_dtype(settings: Settings) -> str:
    """Return DTYPE, with `auto` replaced by what workers on this machine will choose. No torch."""
    if settings.dtype != "auto" or caches_on_gpu(settings) or machine.has_bfloat16():
        return settings.dtype
    return "float32"


def check_memory(settings: Settings) -> None:
    """Check that the caches of all workers fit in memory together. A worker alone cannot see this: memory is
    taken page by page, as it is used.
    """
    if caches_on_gpu(settings):
        return  # each worker checks its own GPU
    available_bytes = machine.available_bytes()
    if settings.num_workers * settings.cpu_cache_bytes > available_bytes:
        wanted = f"{settings.cpu_cache_bytes // MIB} MiB for each of {settings.num_workers} (NUM_WORKERS)"
        raise SettingError(
            "kv_cache_bytes", f"{wanted}, but only {available_bytes // MIB} MiB of memory are available"
        )


def check_ranks() -> None:
    """Refuse to start under torchrun: our workers would read its variables, and wait for ranks that never
    start.
    """
    if os.environ.get("WORLD_SIZE", "1") not in ("", "1"):
        raise SettingError(
            "world_size",
            "is set by torchrun, which starts workers (-m gpu_worker), not fleets; set NUM_SHARD instead",
        )


def check_port(settings: Settings) -> None:
    """Check by a plain bind that the port is free. Gateways share it (SO_REUSEPORT), so they would not notice
    another fleet's gateways on it.
    """
    host, port = settings.listen_host, settings.port
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise SettingError("port", f"{host}:{port} is taken by another process") from error
        name = "port" if error.errno == errno.EACCES else "hostname"
        raise SettingError(name, f"cannot listen on {host}:{port}: {error.strerror}") from error


def check_broker(settings: Settings) -> None:
    asyncio.run(client.check_broker(client.broker_url(settings)))


def with_model(settings: Settings) -> Settings:
    """The settings with the model's directory for `model_id`, so that no process has to look for it again.
    May download or convert.
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
    names = tuple(dict.fromkeys((*settings.served_model_name, settings.model_id)))
    return settings.model_copy(update={"model_id": os.fspath(path), "served_model_name": names})


def wait_for_model(settings: Settings) -> Settings:
    """Wait until a worker has converted the model where this process cannot; then as `with_model`."""
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
    """The settings with which a process of this kind starts alone, once it has a broker and its model."""
    check_broker(settings)
    if kind == "gateway":
        log.info("%s", describe_access(settings))
    return wait_for_model(settings) if kind in WITH_MODEL else settings


def describe_access(settings: Settings) -> str:
    """Who may send requests, in words; not the key itself."""
    key = "must carry the key in API_KEY" if settings.api_key else "need no key (API_KEY is not set)"
    return f"requests {key}; of web pages, {describe_pages(settings)} may send them (CORS_ALLOW_ORIGIN)"


def describe_pages(settings: Settings) -> str:
    """Which web pages may call, besides the fleet's own."""
    if "*" in settings.cors_allow_origin or (settings.api_key and not settings.cors_allow_origin):
        return "any"
    named = " and ".join(settings.cors_allow_origin) or "those of this machine"
    return f"only the fleet's own and {named}"


def set_hub_variables(settings: Settings) -> None:
    """Set the variables of huggingface_hub, which reads them once, when it is imported."""
    if settings.huggingface_hub_cache is not None:
        os.environ["HF_HUB_CACHE"] = settings.huggingface_hub_cache
    if "HF_API_TOKEN" in os.environ:
        os.environ.setdefault("HF_TOKEN", os.environ["HF_API_TOKEN"])


def local_address(settings: Settings) -> tuple[str, int]:
    """Return host and port at which a process of this machine reaches the gateways."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(
        settings.listen_host, settings.listen_host
    ), settings.port


def base_url(settings: Settings) -> str:
    host, port = local_address(settings)
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
