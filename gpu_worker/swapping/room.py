"""Room: which sleeping models may keep their weights in memory when another one is loaded."""

import logging
from collections.abc import Collection

from common.process import machine
from common.settings.settings import Settings
from gpu_worker.swapping.served_model import MEMORY, ServedModel

log = logging.getLogger(__name__)

ENGINE_BYTES = 512 * 2**20
"""Memory of an engine's process without weights and cache."""


def keep_room(next_model: ServedModel, models: Collection[ServedModel], settings: Settings) -> None:
    """End engines that sleep, the one that has slept longest first, until memory has room for the model that
    is next.
    """
    wanted_bytes = needed_bytes(next_model, settings)
    sleeping = [model for model in models if model is not next_model and model.kept_in == MEMORY]
    for model in sorted(sleeping, key=lambda one: one.left_s):
        if machine.available_bytes() >= wanted_bytes:
            return
        log.info("memory is short: the weights of %s are on disk only", model.pool)
        model.end()


def needed_bytes(model: ServedModel, settings: Settings) -> int:
    """Memory of the host that a model takes when it wakes: its cache if that is there, and the rest if it is
    not in memory.
    """
    cache_bytes = settings.cpu_cache_bytes if settings.device == "cpu" else 0
    return cache_bytes if model.kept_in == MEMORY else cache_bytes + ENGINE_BYTES + model.weight_bytes()
