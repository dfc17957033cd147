"""Pools: all that a gateway needs to reach the workers of one, which of them a request tries, and the
registry of those that are open.
"""

import asyncio
import contextlib
import enum
import logging
import os
import random
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from api.answers.call_formats import (
    CALL_FORMAT_ALIASES,
    CALL_FORMATS,
    REASONING_FORMATS,
    CallFormat,
    ReasoningFormat,
    find_call_format,
    find_reasoning_format,
)
from api.errors import LOADING_S, ApiError, cut, invalid, model_not_found, quoted, unavailable
from api.event_loop import background_task
from api.http.auth import KeyRing
from api.prompts.pictures import PicturePrompts
from api.prompts.tokenizer import ModelTokenizer, TextBudget
from api.requests.admission import Admission
from api.requests.monitors import AdapterMonitor, BatcherMonitor, Monitor, WorkerMonitor
from api.requests.validate import load_sampling_defaults
from api.streams.relay import Relay
from common import model_files
from common.adapters import AdapterFault, PoolAdapter, find_adapter
from common.api_keys import ApiKey
from common.broker.client import CONNECT_TIMEOUT_S, broker_url
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
from common.broker.pool_client import PoolClient
from common.model_files import context_length
from common.pooling import read_pooling
from common.settings.settings import SettingError, Settings

log = logging.getLogger(__name__)

Format = TypeVar("Format")

PICTURE_PAYLOAD_LIMIT = 24_000_000
"""Bytes of a request body where the model sees pictures, which are sent in it as base64."""

PLAIN_FORMAT = "llama3_json"
"""The format that a model is asked for if its template has none: `{"name": …, "parameters": …}`."""
NO_REASONING = "none"


class Pool:
    """Connection, tokenizer, relay, monitors and admission of one pool.

    Attributes:
        gateway: incarnation of this gateway; new at every start.
        keys: API keys of this gateway, shared by all its pools.
        adapters: LoRA adapters that requests may name.
        pooling: how the model pools; None if it generates.
        call_format, reasoning_format: how the model writes calls of tools, and reasoning, if it does.
    """

    def __init__(
        self,
        settings: Settings,
        gateway: str,
        tokenizer: ModelTokenizer,
        keys: KeyRing,
        lose: Callable[[], bool] | None = None,
    ) -> None:
        """Raises SettingError."""
        self.settings = settings
        self.gateway = gateway
        self.tokenizer = tokenizer
        self.keys = keys
        path = model_files.resolve(settings.model_id, settings.revision, dtype=settings.dtype)
        self.pooling = read_pooling(path, settings)
        # tokens of a request that is accepted before any worker has said what it holds; 0 accepts none
        longest = settings.max_total_tokens or context_length(path) if settings.scale_to_zero else 0
        self.call_format = call_format_of(settings, tokenizer)
        self.reasoning_format = reasoning_format_of(settings, tokenizer)
        self.client = PoolClient.connect(settings)
        self.relay = Relay(self.client, gateway, lose)
        self.workers = WorkerMonitor(
            self.client,
            gateway,
            settings,
            num_streams=lambda: sum(not (one.left or one.terminal) for one in self.relay.streams.values()),
            longest=longest,
            pooling=self.pooling,
        )
        self.adapters = AdapterMonitor(self.client, adapters_of(settings), settings.heartbeat_s)
        self.batcher = BatcherMonitor(self.client, settings)
        self.pictures = PicturePrompts(self.client, settings, tokenizer.pictures)
        self.admission = Admission(
            self.client,
            gateway=gateway,
            settings=settings,
            tokenizer=tokenizer,
            keys=keys,
            relay=self.relay,
            workers=self.workers,
            batcher=self.batcher,
            pictures=self.pictures,
        )

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["Pool"]:
        """Serve requests while the context is open. The broker may be unreachable at first and come later."""
        await asyncio.gather(self.workers.refresh(), self.adapters.refresh())
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(self.client.redis.aclose)
            stack.push_async_callback(self.workers.heartbeat.remove_in_time)
            for loop in (self.relay.run(), self.workers.run(), self.batcher.run(), self.adapters.run()):
                await stack.enter_async_context(background_task(loop))
            stack.push_async_callback(self.admission.close)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    await self.relay.subscribed.wait()
            yield self

    @property
    def max_body_bytes(self) -> int:
        """Largest body of a request that takes a prompt: where the model sees, it may have pictures."""
        own = self.settings.payload_limit
        return max(own, PICTURE_PAYLOAD_LIMIT) if self.shows_pictures else own

    @property
    def shows_pictures(self) -> bool:
        """Whether a request may have pictures."""
        return self.tokenizer.pictures is not None and any(one.pictures for one in self.workers.ready)

    @property
    def task(self) -> str:
        """What the model makes: EMBED or CLASSIFY (common/messages/request.py); empty for text."""
        return self.pooling.kind if self.pooling else ""

    @property
    def is_live(self) -> bool:
        """Whether a request would be admitted, as far as this gateway knows now."""
        with contextlib.suppress(ApiError):
            self.workers.check()
            return not self.relay.last_error and self.batcher.gone_s <= self.settings.worker_grace_s
        return False

    async def find_adapter(self, name: str) -> PoolAdapter | None:
        """The adapter that requests get by this name. Looks again before it says that there is none."""
        if self.adapters.find(name) is None:
            await self.adapters.refresh_unless_fresh()
        return self.adapters.find(name)

    async def adapter_of(self, target: "Target", key: ApiKey | None) -> str:
        """The key of the adapter that a target names; empty for none. Raises ApiError: 403 if the client's
        API key may not use the model or the adapter, 404 if there is none, 422 if no worker will serve it.
        """
        check_key_model(key, self.settings, target.shown)
        if not target.adapter:
            return ""
        check_key_adapter(key, target.adapter)
        if (adapter := await self.find_adapter(target.adapter)) is None:
            raise model_not_found(f"The model `{cut(target.adapter)}` does not exist")
        self.workers.check_adapter(adapter)
        return adapter.key

    async def check(self) -> None:
        """Raises ApiError (503) if a request would not be served now."""
        await self.admission.check()
        await self.batcher.check()
        if len(silent := self.batcher.silent) >= self.workers.num_ready > 0:
            raise unavailable(f"no worker answers the batcher: {', '.join(silent)}")


def load_tokenizer(settings: Settings, budget: TextBudget | None = None) -> ModelTokenizer:
    """The tokenizer of the settings' model; with `budget`, it shares that of others. Raises SettingError."""
    # A gateway tokenises one prompt at a time: a thread pool would only cost.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    path = model_files.resolve(settings.model_id, settings.revision, dtype=settings.dtype)
    return ModelTokenizer.load(
        path,
        model_files.find_tokenizer(settings.tokenizer_name, path, dtype=settings.dtype),
        settings.tokenizer_config_path,
        settings.chat_template,
        load_sampling_defaults(path, settings),
        budget or TextBudget(num_threads=settings.validation_workers),
        settings.control_tokens_in_messages,
    )


# --- formats of answers -------------------------------------------------------------------------------------


def call_format_of(settings: Settings, tokenizer: ModelTokenizer) -> CallFormat:
    """The call format that TOOL_CALL_PARSER names; by default, the one that the model's template shows."""
    template, name = tokenizer.chat_template, settings.tool_call_parser
    source = template.for_tools.source if template else ""
    shown = find_call_format(source, tokenizer.backend.token_to_id) if name is None else None
    found = shown or named_format("tool_call_parser", CALL_FORMATS, name or PLAIN_FORMAT)
    log.info("call format of the model: %s", found.name)
    return found


def reasoning_format_of(settings: Settings, tokenizer: ModelTokenizer) -> ReasoningFormat | None:
    """The reasoning format that REASONING_PARSER names; by default, the one of the model's template."""
    name = settings.reasoning_parser
    if name is None:
        source = tokenizer.chat_template.source if tokenizer.chat_template else ""
        return find_reasoning_format(source)
    return None if name.lower() == NO_REASONING else named_format("reasoning_parser", REASONING_FORMATS, name)


def named_format(setting: str, formats: Mapping[str, Format], name: str) -> Format:
    """The format of this name. Raises SettingError."""
    if found := formats.get(CALL_FORMAT_ALIASES.get(name.lower(), name.lower())):
        return found
    raise SettingError(setting, f"{name!r} is not one of {', '.join(sorted(formats))}")


def adapters_of(settings: Settings) -> list[PoolAdapter]:
    """Return the records of the adapters of LORA_ADAPTERS. Raises SettingError."""
    found = []
    for source in settings.adapters:
        try:
            found.append(find_adapter(source))
        except AdapterFault as fault:
            raise SettingError("lora_adapters", f"{source.name}: {fault}") from fault
    return found


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


PLACEHOLDERS = ("tgi", "dummy")
"""Model names of clients that do not care which model answers."""
URL_SCHEMES = ("http://", "https://")
IDLE_S = 300.0
"""A foreign pool without live streams is closed after this time without a client that names it."""
CHECK_S = 10.0
NAMES_SHOWN = 5
"""Served models that the error for an unknown one names; /v1/models lists all."""


class Target(NamedTuple):
    """What a client means by a name.

    Attributes:
        pools: that serve it, the own one first; none if nothing has this name.
        adapter: the name, if it is that of an adapter; else empty.
        shown: the name of the model that answers show.
    """

    pools: Sequence[str]
    adapter: str
    shown: str


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
                raise invalid(f"`adapter_id`: there is no adapter {quoted(adapter_id)}", "adapter_id")
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
        holding = [own.pool] if self.own.adapters.find(name) else []
        holding += [one for one, pool in known.items() if one != own.pool and name in pool.entry.adapters]
        if name and holding:
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
                tokenizer = await asyncio.to_thread(load_tokenizer, settings, self.own.tokenizer.budget)
            except SettingError as error:
                raise unavailable(f"pool {name}: {error}") from error
            stack = contextlib.AsyncExitStack()
            foreign = Pool(settings, self.own.gateway, tokenizer, self.own.keys)
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


def is_named(model: str, served: list[str] | tuple[str, ...]) -> bool:
    """Whether `model` is one of a model's served names, or what follows the last slash of one. The bundled
    model has its hub id, too.
    """
    names = (*served, *((model_files.BUNDLED_HUB_ID,) if model_files.BUNDLED in served else ()))
    return any(model in (name, name.rpartition("/")[2]) for name in names)


def names_own(model: str, settings: Settings) -> bool:
    """Whether a client that names `model` means the gateway's own pool.

    Its names are the model's served names, its MODEL_ID, and the pool's name. Clients of endpoints with one
    model send a URL, or a placeholder.
    """
    is_any = model in PLACEHOLDERS or model.startswith(URL_SCHEMES)
    return (
        is_any or model == settings.pool or is_named(model, (*settings.served_model_name, settings.model_id))
    )


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


def check_key_adapter(key: ApiKey | None, adapter: str) -> None:
    """Raises ApiError (403) if an API key may not use this adapter; an empty name is none."""
    if key is not None and adapter and key.adapters and adapter not in key.adapters:
        why = f"The API key {key.key_id} may not use the adapter `{adapter}`"
        raise ApiError(403, "forbidden", why, "model")


def check_key_model(key: ApiKey | None, settings: Settings, shown_name: str = "") -> None:
    """Raises ApiError (403) if an API key may not use the model of a pool.

    Args:
        shown_name: by which the client has asked for it, if that is no name of the pool's own.
    """
    if key is None or not key.models or shown_name in key.models:
        return
    if not any(names_own(name, settings) for name in key.models):
        why = f"The API key {key.key_id} may not use the model `{shown_name or settings.model_name}`"
        raise ApiError(403, "forbidden", why, "model")


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
