"""The registry of pools: those that this gateway has open, and which of them a request tries."""

import asyncio
import contextlib
import enum
import logging
import random
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from api.errors import LOADING_S, cut, invalid, model_not_found, quoted, unavailable
from api.prompts.tokenizer import ModelTokenizer
from api.requests.monitors import Monitor
from api.requests.pool import PICTURE_PAYLOAD_LIMIT, Pool, Target, is_named, names_own
from common.broker.client import broker_url
from common.broker.directory import (
    DATABASE,
    TTL_S,
    DirectoryClient,
    KnownPool,
    PoolEntry,
    address_of,
    join,
    split,
)
from common.settings.settings import SettingError, Settings

log = logging.getLogger(__name__)


# --- choice -------------------------------------------------------------------------------------------------


NUM_PICKS = 2


class Grade(enum.IntEnum):
    """How far a gateway can use a pool, the best first.

    Attributes:
        CLOSED: it is live by the directory, but not open yet.
        AWAY: no worker, no batcher or no broker.
    """

    OPEN = 0
    CLOSED = 1
    AWAY = 2


def pick_by_depth(depths: Mapping[str, float], chance: random.Random) -> list[str]:
    """Two pools picked at random, the one with the shorter queue first; all have the same chance.

    Every gateway knows the depths as they were some time ago. If each took the shortest queue of all, they
    would fill one pool together until they learn of it.

    Args:
        depths: pool → live requests for each row that it can run.
    """
    picks = chance.sample(sorted(depths), min(NUM_PICKS, len(depths)))
    return sorted(picks, key=depths.__getitem__)


# --- directory ----------------------------------------------------------------------------------------------


class DirectoryMonitor(Monitor):
    """Reads the directory at every heartbeat interval. While its broker is away, what was read last stands:
    pools that gateways know are served on.

    Attributes:
        pools: by name.
        read_s: monotonic time of the last read that succeeded.
        is_new: set by every read.
    """

    def __init__(self, client: DirectoryClient, settings: Settings) -> None:
        super().__init__(settings.heartbeat_s, "the directory of pools")
        self.client = client
        self.pools: dict[str, KnownPool] = {}
        self.read_s = 0.0
        self.is_new = asyncio.Event()

    async def read(self) -> None:
        began_s = time.monotonic()
        self.pools = merge(self.pools, await self.client.read(), began_s - self.read_s)
        self.read_s = began_s
        self.is_new.set()


def merge(known: dict[str, KnownPool], found: dict[str, KnownPool], passed_s: float) -> dict[str, KnownPool]:
    """The pools that were just found, and those known before, which have become older: a directory whose
    broker was replaced has none until they write again.
    """
    older = {name: pool._replace(age_s=pool.age_s + passed_s) for name, pool in known.items()}
    return {name: pool for name, pool in (older | found).items() if pool.age_s <= TTL_S}


# --- pool registry ------------------------------------------------------------------------------------------


IDLE_S = 300.0
"""A foreign pool without live streams is closed after this time without a client that names it."""
CHECK_S = 10.0
NAMES_SHOWN = 5
"""Served models that the error for an unknown one names; /v1/models lists all."""


@dataclass(slots=True)
class OpenPool:
    """A foreign pool that is open.

    Attributes:
        address: of its broker, by the directory.
        stack: closes the pool.
        used_s: time at which it was named last, by a client or because it shares a model with others.
    """

    pool: Pool
    address: str
    stack: contextlib.AsyncExitStack
    used_s: float


class PoolRegistry:
    """The gateway's own pool, and the foreign pools of the directory: each is opened when a client first
    names it, or at once if it shares a model with the own one; and closed when it is idle.
    """

    def __init__(self, own: Pool) -> None:
        client = DirectoryClient.connect(own.settings, own.client.redis)
        self.own = own
        self.directory = DirectoryMonitor(client, own.settings)
        self.clock = time.monotonic
        self.chance = random.Random()
        self.foreign: dict[str, OpenPool] = {}
        self.locks: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    def all(self) -> list[Pool]:
        return [self.own, *(found.pool for found in self.foreign.values())]

    @property
    def max_body_bytes(self) -> int:
        """Largest body that any pool takes; of pools that are not open, the model may see."""
        own = self.own
        is_alone = not own.settings.other_models and self.directory.pools.keys() <= {own.settings.pool}
        return own.max_body_bytes if is_alone else max(own.max_body_bytes, PICTURE_PAYLOAD_LIMIT)

    # --- finding --------------------------------------------------------------------------------------------

    async def find(self, model: str | None) -> Pool:
        """The first pool that a request for `model` tries. Raises ApiError as `target` and `tried`."""
        return (await self.tried(await self.target(model)))[0]

    async def target(self, model: str | None, adapter_id: str | None = None) -> Target:
        """What `resolve` finds, of an `adapter_id` of TGI's routes an adapter alone. Looks again before it
        says that there is nothing. Raises ApiError: 404 `model_not_found`, 422 if there is no such adapter;
        503 where the directory cannot be read.
        """
        if adapter_id is not None:
            await self.own.find_adapter(adapter_id)
            if not (target := self.resolve(adapter_id)).adapter:
                raise invalid(f"`adapter_id`: there is no adapter {quoted(adapter_id)}")
            return target
        if not self.resolve(model).pools:
            await asyncio.gather(
                self.directory.refresh_unless_fresh(), self.own.adapters.refresh_unless_fresh()
            )
        if not (target := self.resolve(model)).pools:
            if self.directory.last_error:
                raise unavailable(f"the directory of pools cannot be read: {self.directory.last_error}")
            served = ", ".join(f"`{name}`" for name in self.served_names()[:NAMES_SHOWN])
            raise model_not_found(f"The model `{cut(model or '')}` does not exist; served: {served}")
        return target

    async def tried(self, target: Target) -> list[Pool]:
        """The pools that a request tries, in this order: one or two. Raises ApiError (503) while none of them
        has a worker, and where the model's files cannot be read.
        """
        return [await self.named(name) for name in self.choose(target.pools)]

    def resolve(self, name: str | None) -> Target:
        """What a client means by a name, as far as this gateway knows now: an adapter, a pool, or a
        model.
        """
        own, known = self.own.settings, self.directory.pools
        if name and (holding := self.holding(name)):
            return Target(holding, name, name)
        is_own = not name or names_own(name, own)
        model = own.model_name if is_own else name or ""
        others = [other for other in known if other != own.pool and self.has_model(other, model)]
        if name and name in (own.pool, *own.other_models, *known):
            pools = [name]
        elif not is_own and (full := [one for one in own.other_models if one.rpartition("/")[2] == model]):
            pools = full[:1]
        else:
            pools = [own.pool, *others] if is_own or (own.any_model_name and not others) else others
        return Target(pools, "", own.model_name if is_own or pools == [own.pool] else model)

    def holding(self, adapter: str) -> list[str]:
        """The pools that have an adapter of this name, all of one model: of the own one, if the own pool has
        it.
        """
        own, known = self.own.settings, self.directory.pools
        others = [one for one in known if one != own.pool and adapter in known[one].entry.adapters]
        if self.own.adapters.find(adapter):
            return [own.pool, *(one for one in others if self.has_model(one, own.model_name))]
        others.sort(key=lambda one: (not known[one].is_live, one))
        return [one for one in others if known[one].entry.model_id == known[others[0]].entry.model_id]

    def is_model(self, name: str) -> bool:
        """Whether a client that names `name` means a model, or a pool."""
        own, known = self.own.settings, self.directory.pools
        is_pool = name in (*own.other_models, *known)
        return is_pool or names_own(name, own) or any(self.has_model(pool, name) for pool in known)

    def choose(self, names: Sequence[str]) -> list[str]:
        """The pools that a request tries, of those that serve it, by queue depth. Pools that are not live are
        left out as long as one is.
        """
        grades = {name: self.grade(name) for name in names}
        best = [name for name in names if grades[name] == min(grades.values())]
        if grades[best[0]] == Grade.AWAY:
            return best[:1]
        return pick_by_depth({name: self.depth(name) for name in best}, self.chance)

    def has_model(self, name: str, model: str) -> bool:
        return is_named(model, self.directory.pools[name].entry.models)

    def grade(self, name: str) -> Grade:
        """How far a pool can be used, as far as this gateway knows now."""
        known, is_own = self.directory.pools.get(name), name == self.own.settings.pool
        if not known.is_live if known else name not in self.own.settings.pools:
            return Grade.AWAY
        if not is_own and name not in self.foreign:
            return Grade.CLOSED
        pool = self.own if is_own else self.foreign[name].pool
        return Grade.OPEN if pool.is_live else Grade.AWAY

    def depth(self, name: str) -> float:
        known = self.directory.pools.get(name)
        return known.entry.depth if known else 0.0

    def served_names(self) -> list[str]:
        """The names of all models that live pools serve, of pools with another model than the own one, and of
        the adapters of pools that are not open.
        """
        own = self.own.settings
        names = [*(own.served_model_name or (own.model_id,)), *own.other_models]
        for name, known in sorted(self.directory.pools.items()):
            if name != own.pool and known.is_live:
                is_other = not self.has_model(name, own.model_name)
                names += [*known.entry.models, *([name] if is_other else [])]
                names += [] if name in self.foreign else known.entry.adapters
        return [*dict.fromkeys(names)]

    # --- opening and closing --------------------------------------------------------------------------------

    async def named(self, name: str) -> Pool:
        """The pool `name`, opened if it has a live worker. Raises ApiError (503)."""
        if name == self.own.settings.pool:
            return self.own
        if name not in self.foreign:
            await self.open(name)
        found = self.foreign[name]
        found.used_s = self.clock()
        return found.pool

    async def open(self, name: str) -> None:
        """Open a foreign pool, unless it is open. Raises ApiError (503)."""
        entry = await self.find_entry(name)
        async with self.locks[name]:
            if name in self.foreign:
                return
            own = self.own.settings
            try:
                settings = foreign_settings(own, name, entry) if entry else own.of_pool(name)
                tokenizer = await asyncio.to_thread(ModelTokenizer, settings, self.own.tokenizer.budget)
                foreign = Pool(settings, self.own.gateway, tokenizer, self.own.keys)
            except SettingError as error:
                raise unavailable(f"pool {name}: {error}") from error
            stack = contextlib.AsyncExitStack()
            pool = await stack.enter_async_context(foreign.running())
            address = address_of(broker_url(settings))
            log.info("pool %s is open: it serves %s, at the broker %s", name, settings.model_id, address)
            known_address = entry.address if entry else address
            self.foreign[name] = OpenPool(pool, known_address, stack, self.clock())

    async def find_entry(self, name: str) -> PoolEntry | None:
        """What the directory says of a live pool; None for a model of MODELS, which may not be there yet.
        Raises ApiError (503).
        """
        if name in self.own.settings.other_models:
            return None
        if (known := self.directory.pools.get(name)) is None or not known.is_live:
            await self.directory.refresh_unless_fresh()
            known = self.directory.pools.get(name)
        if known and not known.is_live and known.entry.num_loading:
            raise unavailable(f"the worker of pool {cut(name)} still loads its model", LOADING_S)
        if known is None or not known.is_live:
            raise unavailable(f"the pool {cut(name)} has no worker")
        return known.entry

    async def run(self) -> None:
        """Read the directory, open shared pools and close idle ones. Never returns."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.directory.run())
            tasks.create_task(self.open_shared_forever())
            while True:
                await asyncio.sleep(CHECK_S)
                await self.close_idle()

    async def open_shared_forever(self) -> None:
        failed: dict[str, str] = {}
        while True:
            await self.directory.is_new.wait()
            self.directory.is_new.clear()
            # live pools that requests for the own model may go to
            own, pools = self.own.settings, self.directory.pools
            others = [name for name, known in pools.items() if name != own.pool and known.is_live]
            names = [name for name in others if self.has_model(name, own.model_name)]
            results = await asyncio.gather(*map(self.named, names), return_exceptions=True)
            for name, result in zip(names, results, strict=True):
                cause = str(result) if isinstance(result, BaseException) else ""
                if cause and cause != failed.get(name):
                    log.warning("pool %s is not opened: %s", name, cause)
                failed[name] = cause

    async def close_idle(self) -> None:
        """Close the foreign pools without live streams that nobody has named for IDLE_S, or that have moved
        to another broker.
        """
        for name in list(self.foreign):
            async with self.locks[name]:
                # checked right before it closes: a client may name it while another pool closes
                found, known = self.foreign[name], self.directory.pools.get(name)
                has_moved = known is not None and known.entry.address != found.address
                is_idle = has_moved or self.clock() - found.used_s > IDLE_S
                if is_idle and not found.pool.relay.streams:
                    log.info("pool %s is closed: nobody named it for %.0f s, or it has moved", name, IDLE_S)
                    await self.foreign.pop(name).stack.aclose()

    async def aclose(self) -> None:
        """Close all foreign pools, and the directory, unless it is at the own pool's broker."""
        for name in list(self.foreign):
            async with self.locks[name]:
                await self.foreign.pop(name).stack.aclose()
        if self.directory.client.redis is not self.own.client.redis:
            await self.directory.client.redis.aclose()


def foreign_settings(settings: Settings, name: str, entry: PoolEntry) -> Settings:
    """Settings of a foreign pool: the gateway's own ones, with its broker, and the model that its workers
    report. Its requests wait while its model sleeps. Raises SettingError.
    """
    changed = {
        "redis_url": pool_url(settings, name, entry.address),
        "served_model_name": (name, *entry.models),
        "scale_to_zero": settings.scale_to_zero or entry.num_sleepers > 0,
    }
    found = settings.of_model(name, entry.model_id, entry.tokenizer_name or None)
    return found.model_copy(update=changed)


def url_at(address: str, own_url: str) -> str:
    """The URL by which a process that reaches `own_url` reaches the broker at `address`.

    Raises ValueError where the password would leave a broker with TLS for one without.
    """
    if address == address_of(own_url):
        return own_url
    scheme, user, _, own_options = split(own_url)
    their_scheme, _, place, options = split(address)
    if user and scheme.startswith("rediss") and their_scheme in ("redis", "redis+sentinel"):
        raise ValueError("it has no TLS, and REDIS_URL has: the password is not sent in clear")
    if scheme == their_scheme:
        options = {name: text for name, text in own_options.items() if name != DATABASE} | options
    return join(their_scheme, user, place, options)


def pool_url(settings: Settings, pool: str, address: str) -> str:
    """The URL of another pool's broker. Raises SettingError if there is no safe way to reach it."""
    if (given := settings.urls_of_pools.get(pool)) is not None:
        return given
    try:
        return url_at(address, settings.redis_url or "")
    except ValueError as error:
        cause = f"must name the broker of pool {pool!r}: by the directory it is at {address}, and {error}"
        raise SettingError("pool_urls", cause) from error
