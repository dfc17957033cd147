"""The pools that a gateway serves: its own, and others as soon as a client names one that has a live worker."""

import asyncio
import contextlib
import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from redis.asyncio import Redis

from api.errors import ApiError, asking_broker, unavailable
from api.inference.tokenizer import ModelTokenizer
from common import model_files
from common.broker.keys import POOLS, Keys
from common.messages.codec import WireError, decode
from common.messages.plan import WorkerCapacity
from common.settings.settings import SettingError, Settings

if TYPE_CHECKING:
    from api.inference.pool import Pool

log = logging.getLogger(__name__)

ANY_MODEL = (None, "", "tgi", "dummy")
"""What clients say that do not care, or have to say something."""


class PoolRegistry:
    """Finds the pool for a model's name. Pools of others are opened once and kept until `close`."""

    def __init__(self, own: "Pool", redis: Redis, name: str) -> None:
        self.own, self.redis, self.name = own, redis, name
        self.opened: dict[str, Pool] = {}
        self.stack = contextlib.AsyncExitStack()
        self.opening = asyncio.Lock()

    async def find(self, model: str | None) -> "Pool":
        """The parts that serve `model`. Raises ApiError: 404 `model_not_found`, 503 where that cannot be found
        out.
        """
        if model in ANY_MODEL or model in names(self.own.settings):
            return self.own
        assert model is not None
        if model not in self.opened:
            async with self.opening:
                if model not in self.opened:
                    self.opened[model] = await self.open(model)
        return self.opened[model]

    async def others(self) -> list[str]:
        """Names of the other pools that have a live worker."""
        members: list[bytes] = await self.redis.zrange(POOLS, 0, -1)
        pools = sorted(member.decode() for member in members if member != self.own.settings.pool.encode())
        return [pool for pool in pools if await self.worker(pool)]

    async def open(self, pool: str) -> "Pool":
        async with asking_broker():
            worker = await self.worker(pool) if await self.redis.zscore(POOLS, pool) is not None else None
        if worker is None:
            raise ApiError(
                404,
                "model_not_found",
                f"The model `{pool}` does not exist",
                param="model",
                code="model_not_found",
            )
        settings = of_pool(self.own.settings, pool, worker)
        try:
            path = await asyncio.to_thread(model_files.resolve, settings.model_id, settings.revision)
            tokenizer = await asyncio.to_thread(ModelTokenizer.load, Path(path))
        except SettingError as error:
            raise unavailable(f"pool {pool}: {error}") from error
        log.info("pool %s is served too: %s", pool, settings.model_id)
        return await self.stack.enter_async_context(type(self.own)(settings, self.name, tokenizer).running())

    async def worker(self, pool: str) -> WorkerCapacity | None:
        """The capacity of any live worker of a pool."""
        keys = Keys(pool)
        for incarnation in await self.redis.zrange(keys.workers, 0, -1):
            capacity = await self.redis.hget(keys.worker(incarnation.decode()), "capacity")  # type: ignore[misc]
            with contextlib.suppress(WireError):
                if capacity is not None:
                    return decode(WorkerCapacity, capacity)
        return None

    async def close(self) -> None:
        await self.stack.aclose()


def names(settings: Settings) -> tuple[str, ...]:
    """What the model of a pool is called: as answers name it, as it was given, and the pool itself."""
    return (settings.model_name, settings.model_id, settings.pool)


def of_pool(settings: Settings, pool: str, worker: WorkerCapacity) -> Settings:
    """Settings for another pool: its limits are what its workers say."""
    return replace(
        settings,
        pool=pool,
        model_id=worker.model_id or worker.model,
        served_model_name=pool,
        revision=None,
        max_total_tokens=None,
        max_input_tokens=None,
    )
