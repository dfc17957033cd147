"""Loading of a worker: its model and tokenizer are found, its engine becomes ready, its capacity is known."""

import logging
from dataclasses import replace
from pathlib import Path

from tokenizers import Tokenizer

from common import model_files
from common.broker.heartbeat import Heartbeat
from common.broker.keys import STARTING
from common.broker.pool_client import PoolClient
from common.messages.plan import WorkerCapacity
from common.model_files import read_other_tokenizer, read_tokenizer
from common.settings.settings import SettingError, Settings
from gpu_worker.agent.engine_client import EngineClient

log = logging.getLogger(__name__)


def resolve(settings: Settings, dtype: str = "") -> Path:
    """The directory of the model. Raises SettingError."""
    weightless, dtype = settings.makes_weights, dtype or settings.dtype
    return model_files.resolve(
        settings.model_id, settings.revision, log.info, weightless=weightless, dtype=dtype
    )


def find_tokenizer(settings: Settings, directory: Path) -> Tokenizer:
    """The tokenizer for the model in a directory. Raises SettingError."""
    found = model_files.find_tokenizer(settings.tokenizer_name, directory, log.info, settings.dtype)
    if settings.tokenizer_name is None:
        return read_tokenizer(found)
    return read_other_tokenizer(found, directory)


async def wait_for_engine(settings: Settings, engine: EngineClient, incarnation: str) -> WorkerCapacity:
    """Wait until the engine is loaded; heartbeats tell meanwhile what it does. Raises SettingError,
    EngineDied.
    """
    doing = "starting"

    def progress(text: str) -> None:
        nonlocal doing
        doing = text
        log.info(text)

    async with PoolClient.connect(settings) as pool:
        heartbeat = Heartbeat(pool, STARTING, incarnation, settings.worker_ttl_s)
        async with heartbeat.sending(settings.heartbeat_s, lambda: {"doing": doing}):
            return await engine.ready(progress)


def capacity(
    settings: Settings, ready: WorkerCapacity, name: str, incarnation: str, directory: Path
) -> WorkerCapacity:
    """Return the capacity that heartbeats carry. Raises SettingError for a limit that leaves no room, or that
    is larger than context and cache allow.
    """
    budget = settings.max_batch_total_tokens
    num_blocks = ready.num_blocks if budget is None else min(ready.num_blocks, budget // ready.block_size)
    if not num_blocks:
        raise SettingError(
            "max_batch_total_tokens", f"{budget} is less than one block of {ready.block_size} tokens"
        )
    longest = min(ready.context, num_blocks * ready.block_size)
    for setting, most in (("max_total_tokens", longest), ("max_input_tokens", longest - (not ready.pooling))):
        if (getattr(settings, setting) or 0) > most:
            cause = f"is more than the {most} tokens that context and KV cache allow"
            raise SettingError(setting, f"{getattr(settings, setting)} {cause}")
    return replace(
        ready,
        incarnation=incarnation,
        name=name,
        model=directory.name,
        model_id=settings.model_id,
        tokenizer_name=settings.tokenizer_name or "",
        num_blocks=num_blocks,
        standby=True,
        served_names=[*(settings.served_model_name or (settings.model_id,))],
    )
