"""Pool registry: finds the pool that serves a model; opens and closes the pools of other fleets."""

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass
from typing import TypeVar, cast

from starlette.requests import Request

from api.errors import LOADING_S, asking_broker, cut, model_not_found, unavailable
from api.http import body
from api.requests.fields import ServedFields
from api.requests.pool import Pool, load_tokenizer
from common import model_files
from common.broker.keys import POOLS, STARTING, Keys
from common.messages.codec import WireError, decode
from common.messages.plan import WorkerCapacity
from common.settings.settings import SettingError, Settings

log = logging.getLogger(__name__)

Shape = TypeVar("Shape", bound=ServedFields)

PLACEHOLDERS = ("tgi", "dummy")
"""Model names of clients that do not care which model answers."""
URL_SCHEMES = ("http://", "https://")
IDLE_S = 300.0
"""A foreign pool without live streams is closed after this time without a client that names it."""
CHECK_S = 10.0


@dataclass(slots=True)
class OpenPool:
    """A foreign pool that is open.

    Attributes:
        stack: closes the pool.
        used_s: time at which a client named it last.
    """

    pool: Pool
    stack: contextlib.AsyncExitStack
    used_s: float


class PoolRegistry:
    """The gateway's own pool, and foreign pools: each is opened when a client first names it, if it has a
    live worker, and closed when it is idle.
    """

    def __init__(self, own: Pool) -> None:
        self.own = own
        self.clock = time.monotonic
        self.foreign: dict[str, OpenPool] = {}
        self.lock = asyncio.Lock()

    def all(self) -> list[Pool]:
        return [self.own, *(found.pool for found in self.foreign.values())]

    async def find(self, model: str | None) -> Pool:
        """The pool that serves `model`. Raises ApiError: 404 `model_not_found`; 503 while its first worker
        loads, and where the broker or the model's files cannot be read.
        """
        if not model or names_own(model, self.own.settings):
            return self.own
        pool = await self.find_foreign(model)
        if pool is None and self.own.settings.any_model_name:
            return self.own
        if pool is None:
            raise model_not_found(f"The model `{cut(model)}` does not exist")
        return pool

    async def named(self, name: str) -> Pool:
        """The pool `name`, where a request was admitted. Raises ApiError (503), also if it has no live
        worker.
        """
        pool = self.own if name == self.own.settings.pool else await self.find_foreign(name)
        if pool is None:
            raise unavailable(f"the pool {name} has no worker")
        return pool

    async def find_foreign(self, name: str) -> Pool | None:
        """The foreign pool `name`, opened if it has a live worker. Raises ApiError (503)."""
        if name not in self.foreign:
            async with asking_broker():
                worker = await self.find_worker(name)
                if worker is None and await self.is_loading(name):
                    raise unavailable(f"the worker of pool {cut(name)} still loads its model", LOADING_S)
            if worker is None:
                return None
            async with self.lock:
                if name not in self.foreign:
                    self.foreign[name] = await self.open_pool(name, worker)
        found = self.foreign[name]
        found.used_s = self.clock()
        return found.pool

    async def names_of_others(self) -> list[str]:
        """Names of the foreign pools that have a live worker."""
        members: list[bytes] = await self.own.client.redis.zrange(POOLS, 0, -1)
        names = sorted(member.decode() for member in members if member != self.own.settings.pool.encode())
        return [name for name in names if await self.find_worker(name)]

    async def run(self) -> None:
        """Close idle pools. Never returns."""
        while True:
            await asyncio.sleep(CHECK_S)
            await self.close_idle()

    async def close_idle(self) -> None:
        """Close the foreign pools that nobody has named for IDLE_S and that have no live streams."""
        async with self.lock:
            for name, open_pool in list(self.foreign.items()):
                # checked right before it closes: a client may name it while another pool closes
                if self.clock() - open_pool.used_s > IDLE_S and not open_pool.pool.relay.streams:
                    log.info("pool %s is closed: no client named it for %.0f s", name, IDLE_S)
                    await self.foreign.pop(name).stack.aclose()

    async def aclose(self) -> None:
        """Close all foreign pools."""
        async with self.lock:
            while self.foreign:
                await self.foreign.popitem()[1].stack.aclose()

    async def open_pool(self, name: str, worker: WorkerCapacity) -> OpenPool:
        settings = foreign_settings(self.own.settings, name, worker)
        try:
            tokenizer = await asyncio.to_thread(load_tokenizer, settings, self.own.tokenizer.budget)
        except SettingError as error:
            raise unavailable(f"pool {name}: {error}") from error
        stack = contextlib.AsyncExitStack()
        pool = await stack.enter_async_context(Pool(settings, self.own.gateway, tokenizer).running())
        log.info("pool %s is open: it serves %s", name, settings.model_id)
        return OpenPool(pool, stack, self.clock())

    async def find_worker(self, name: str) -> WorkerCapacity | None:
        """The capacity of any live worker of a pool, if there is such a pool."""
        keys, redis = Keys(name), self.own.client.redis
        if await redis.zscore(POOLS, name) is None:
            return None
        for incarnation in await redis.zrange(keys.workers, 0, -1):
            capacity = await redis.hget(keys.worker(incarnation.decode()), "capacity")  # type: ignore[misc]
            with contextlib.suppress(WireError):
                if capacity is not None:
                    return decode(WorkerCapacity, capacity)
        return None

    async def is_loading(self, name: str) -> bool:
        """Whether there is such a pool, and a worker of it that is not ready for the first time yet."""
        keys, redis = Keys(name), self.own.client.redis
        if await redis.zscore(POOLS, name) is None:
            return False
        for member in await redis.zrange(keys.processes, 0, -1):
            kind, _, process = member.decode().partition(":")
            if kind == STARTING and await redis.exists(keys.starting(process)):
                return True
        return False


def names_own(model: str, settings: Settings) -> bool:
    """Whether a client that names `model` means the gateway's own pool.

    Its names are the model's served names, what follows the last slash of each, its MODEL_ID, the bundled
    model's hub id, and the pool's name. Clients of endpoints with one model send a URL, or a placeholder.
    """
    served = (*settings.served_model_name, settings.model_id)
    bundled = (model_files.BUNDLED_HUB_ID,) if model_files.BUNDLED in served else ()
    names = (*served, *bundled)
    short_names = (name.rpartition("/")[2] for name in names)
    return model in (*PLACEHOLDERS, *names, *short_names, settings.pool) or model.startswith(URL_SCHEMES)


def foreign_settings(settings: Settings, name: str, worker: WorkerCapacity) -> Settings:
    """Settings of a foreign pool: the gateway's own ones, with the model and the limits that its workers
    report.
    """
    changed = {
        "pool": name,
        "model_id": worker.model_id or worker.model,
        "served_model_name": (name,),
        "revision": None,
        "tokenizer_name": worker.tokenizer_name or None,
        "tokenizer_config_path": None,
        "chat_template": None,
        "override_generation_config": None,
        "max_total_tokens": None,
        "max_input_tokens": None,
        "tool_call_parser": None,
        "reasoning_parser": None,
    }
    return settings.model_copy(update=changed)


# --- requests over HTTP -------------------------------------------------------------------------------------


def pools_of(request: Request) -> PoolRegistry:
    return cast(PoolRegistry, request.app.state.pools)


def own_pool(request: Request) -> Pool:
    """The gateway's own pool, whatever model the request names."""
    return pools_of(request).own


async def pool_and_body(request: Request, shape: type[Shape]) -> tuple[Pool, Shape]:
    """The pool that serves the body's model, and the body. Raises ApiError."""
    pools = pools_of(request)
    parsed = await body.read(request, shape, pools.own.settings.payload_limit)
    parsed.check()
    return await pools.find(parsed.model), parsed
