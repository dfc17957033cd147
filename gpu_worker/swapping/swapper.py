"""The models of a worker. Of each, files and tokenizer are found, the engine becomes ready, its capacity is
known. A worker that has several leaves one pool and joins another.

Which is next is a pure function of what waits, and of what swaps take. A worker serves one model at a time. A
turn is its time with one of them. A turn that is asked for by others ends when nobody asks for its own model
any more, or when it has lasted several times as long as a swap: so swaps take a bounded share of the time.

A swap is: no row starts any more, rows get a moment to end, the incarnation is sealed, so that its batcher
resumes what is left; the engine sleeps, the other one wakes, and joins its pool as the next incarnation. All
requests wait in Redis meanwhile: a worker that is killed at any point of this leaves nothing else behind.
"""

import asyncio
import contextlib
import hashlib
import logging
import math
import signal
import time
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tokenizers import Tokenizer

from common import model_files
from common.broker.client import ERRORS, describe_error
from common.broker.heartbeat import Heartbeat
from common.broker.keys import SLEEPER, STARTING, Keys
from common.broker.pool_client import PoolClient
from common.messages.plan import WorkerCapacity
from common.metrics import catalogue
from common.model_files import read_other_tokenizer, read_tokenizer
from common.process import machine
from common.process.event_loop import run_until_one_ends
from common.process.logs import next_incarnation
from common.process.startup import ProcessIdentity
from common.rank import RankInfo
from common.settings.settings import SettingError, Settings
from gpu_worker.agent.agent import Agent
from gpu_worker.agent.engine_client import EngineClient, EngineDied, RankProcess
from gpu_worker.agent.publish import Sealed
from gpu_worker.agent.state import AgentState
from gpu_worker.agent.steps import EngineStuck

IDLE_SWAPS = 0.1
"""A turn ends early when its model was not asked for this share of what swaps take."""
TURN_SWAPS = 4.0
"""A turn lasts this many times as long as the swaps for it: they take a fifth of the time."""
MIN_TURN_S = 1.0


@dataclass(frozen=True, slots=True)
class PoolDemand:
    """What one model is asked for.

    Attributes:
        num_waiting: requests that no worker computes.
        waited_s: how long some have waited without a break since this worker left.
        num_rows: requests that workers compute.
        num_workers: workers that serve the model now.
        swap_s: how long it takes to wake the model.
        can_wake: False while it has just failed to.
    """

    pool: str
    num_waiting: int = 0
    waited_s: float = 0.0
    num_rows: int = 0
    num_workers: int = 0
    swap_s: float = 0.0
    can_wake: bool = True


def choose(own: PoolDemand, others: Sequence[PoolDemand], lasted_s: float, idle_s: float) -> str | None:
    """The pool to serve next, the one that has waited longest, or None: the turn of the worker's own model
    goes on, which has lasted for `lasted_s`, and has had nothing to do for `idle_s`.

    It ends at once if nobody asks for its model any more. A client that asks again at once is waited for,
    since a swap back and forth would take longer. A model that has workers needs another only for requests
    that have waited for longer than a swap, and only one that has nothing else to do.
    """

    def is_idle(other: PoolDemand) -> bool:
        is_busy = own.num_rows or own.num_waiting
        return not is_busy and idle_s >= IDLE_SWAPS * (own.swap_s + other.swap_s)

    asked = [
        other
        for other in others
        if other.num_waiting and other.can_wake
        if not other.num_workers or (is_idle(other) and other.waited_s > other.swap_s)
    ]
    first = max(asked, key=lambda other: other.waited_s, default=None)
    if first is None:
        return None
    turn_s = 0.0 if is_idle(first) else max(MIN_TURN_S, TURN_SWAPS * (own.swap_s + first.swap_s))
    return first.pool if lasted_s >= turn_s else None


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


def model_digest(settings: Settings, directory: Path) -> str:
    """Digest of the model in a directory, the same on all machines; empty for made weights. A converted GGUF
    file has its own, which is in the directory's name: conversions differ with DTYPE.
    """
    if settings.makes_weights:
        return ""
    if directory.parent == machine.cache_folder(model_files.CONVERTED):
        return directory.name.removesuffix(f"-{model_files.EXACT_DTYPE}").rpartition("-")[2]
    digests = sorted(model_files.file_digests(directory).items())
    return hashlib.sha256(repr(digests).encode()).hexdigest()


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


CLAIM_SPARE_S = 5.0
"""A claim lasts this much longer than twice the swap."""
COUNTS = ["waiting", "oldest_ms", "rows", "workers"]
"""Fields of a pool's state that say what it is asked for."""
TOLD_MS = 1500
"""Time in which a batcher has said that its pool has a worker."""
UNKNOWN_SWAP_S = 10.0
"""What a first swap to a model is taken to last."""
MEMORY_SHARE = 0.1
"""What a first swap from memory is taken to last, as a share of one from disk."""
FIRST_RETRY_S, LAST_RETRY_S = 10.0, 600.0
SLEEP_TIMEOUT_S = 60.0
MEMORY, DISK = "memory", "disk"


class ServedModel:
    """One model of a worker, and its pool.

    Attributes:
        environ: for the engine's processes, beside settings.
        engine: None while the model is on disk only.
        state: of the last incarnation over this engine: numbers of rows and steps go on.
        kept_in: where the weights of the model are while it sleeps.
        woken_from: where they were before it was woken last.
        swap_ms: what the last swap from memory took, and the last one from disk.
        left_s: monotonic time at which this worker left the pool.
        asked_s: monotonic time since when some requests wait without a break; None while none does.
        retry_s: monotonic time before which it is not woken again, since it has failed to.
    """

    def __init__(
        self, settings: Settings, client: PoolClient, environ: Mapping[str, str], ranks: Sequence[RankInfo]
    ) -> None:
        self.settings = settings
        self.client = client
        self.environ = environ
        self.ranks = ranks
        self.engine: EngineClient | None = None
        self.state: AgentState | None = None
        self.digest = ""
        self.doing = "asleep"
        self.woken_from = DISK
        self.swap_ms: dict[str, float] = {}
        self.left_s = -math.inf
        self.asked_s: float | None = None
        self.retry_s = 0.0
        self.num_failures = 0

    @property
    def pool(self) -> str:
        return self.settings.pool

    @property
    def is_spread(self) -> bool:
        """Whether other machines have ranks of it, too."""
        return len(self.ranks) < self.ranks[0].world_size

    @property
    def kept_in(self) -> str:
        return MEMORY if self.engine and self.engine.ranks[0].is_open else DISK

    @property
    def swap_s(self) -> float:
        """How long the next swap to it takes, as far as is known."""
        from_disk_ms = self.swap_ms.get(DISK, 1000 * UNKNOWN_SWAP_S)
        if self.kept_in == DISK:
            return from_disk_ms / 1000
        return self.swap_ms.get(MEMORY, from_disk_ms * MEMORY_SHARE) / 1000

    def describe(self) -> dict[str, str | int]:
        """The fields of its heartbeat, by which gateways find the model while it sleeps."""
        return {
            "state": self.doing,
            "kept_in": self.kept_in,
            "swap_ms": round(self.swap_ms.get(self.kept_in, 0.0)),
            "model_id": self.settings.model_id,
            "tokenizer_name": self.settings.tokenizer_name or "",
        }

    def demand(self, counts: Mapping[str, int]) -> PoolDemand:
        """What the model is asked for: by COUNTS, those that its batcher has told, and what this worker knows
        of its own time here.
        """
        now_s, num_waiting = time.monotonic(), counts.get("waiting", 0)
        if not num_waiting or self.doing == "awake":
            self.asked_s = None
        elif self.asked_s is None:
            self.asked_s = max(now_s - counts.get("oldest_ms", 0) / 1000, self.left_s)
        return PoolDemand(
            self.pool,
            num_waiting=num_waiting,
            waited_s=0.0 if self.asked_s is None else now_s - self.asked_s,
            num_rows=counts.get("rows", 0),
            num_workers=counts.get("workers", 0),
            swap_s=self.swap_s,
            can_wake=now_s >= self.retry_s,
        )

    async def wake(
        self, name: str, incarnation: str, preloaded: Sequence[RankProcess]
    ) -> tuple[EngineClient, WorkerCapacity]:
        """Wake the engine, or start one → what it holds. Raises EngineDied, SettingError."""
        self.woken_from, started_s = self.kept_in, time.monotonic()
        if self.woken_from == DISK:
            self.end()  # an engine that was killed while it slept
        self.doing = "waking"
        try:
            # ranks of other machines wait for these: they all find the model once they are connected
            directory = None if self.is_spread else await asyncio.to_thread(resolve, self.settings)
            found = {"model_id": str(directory)} if directory else {}
            environ = {**self.settings.model_copy(update=found).environ(), **self.environ}
            engine = self.engine = self.engine or await EngineClient.start(environ, self.ranks, preloaded)
            if self.woken_from == MEMORY:
                engine.wake_up()
            if directory:
                await self.read_files(directory)
            ready = await self.loaded(engine, incarnation)
            directory = directory or resolve(self.settings, ready.dtype)
            worker = capacity(self.settings, ready, name, incarnation, directory)
            await self.read_files(directory)
            worker = replace(worker, model_digest=self.digest)
        except BaseException:
            self.end()
            raise
        self.swap_ms[self.woken_from] = 1000 * (time.monotonic() - started_s)
        self.doing = "awake"
        self.num_failures = 0
        return engine, worker

    async def loaded(self, engine: EngineClient, incarnation: str) -> WorkerCapacity:
        """Wait until the engine is loaded; heartbeats tell meanwhile what it does. Raises SettingError,
        EngineDied.
        """
        doing: dict[str, str | int] = {"doing": "starting"}

        def progress(text: str) -> None:
            doing["doing"] = text
            log.info(text)

        beat = Heartbeat(self.client, STARTING, incarnation, self.settings.worker_ttl_s)
        async with beat.sending(self.settings.heartbeat_s, lambda: doing):
            return await engine.ready(progress)

    async def read_files(self, directory: Path) -> None:
        """Make the digest and the state of the first incarnation over an engine, if there is none yet."""
        if self.state is None:
            self.digest = await asyncio.to_thread(model_digest, self.settings, directory)
            tokenizer = await asyncio.to_thread(find_tokenizer, self.settings, directory)
            self.state = AgentState(tokenizer)
            machine.return_memory()

    async def sleep(self) -> None:
        """Have the engine, which holds no row, sleep; several ranks end instead."""
        self.doing = "asleep"
        if self.engine is None:
            return
        if len(self.ranks) == 1:
            with contextlib.suppress(EngineDied, TimeoutError):
                async with asyncio.timeout(SLEEP_TIMEOUT_S):
                    await self.engine.sleep()
                return
        self.end()

    def end(self) -> None:
        """End the engine, if there is one: the model is on disk only."""
        self.doing = "asleep"
        if self.engine is not None:
            self.engine.kill()
        self.engine = None
        self.state = None

    def note_failure(self, error: Exception) -> None:
        """The model cannot be woken; it is tried again later, and later each time."""
        pause_s = min(FIRST_RETRY_S * 2**self.num_failures, LAST_RETRY_S)
        self.num_failures += 1
        self.retry_s = time.monotonic() + pause_s
        log.error("%s cannot be woken, and is tried again in %.0f s: %s", self.pool, pause_s, error)

    def weight_bytes(self) -> int:
        """Size of the weights on disk, which is about what they take in memory; 0 if that is not known."""
        path = model_files.find_local(self.settings.model_id, self.settings.revision, self.settings.dtype)
        return sum(file.stat().st_size for file in model_files.weight_files(path)) if path else 0


ENGINE_BYTES = 512 * 2**20
"""Memory of an engine's process without weights and cache."""


def keep_room(next_model: ServedModel, models: Collection[ServedModel], settings: Settings) -> None:
    """End engines that sleep, the one that has slept longest first, until memory has room for the model that
    is next.
    """
    sleeping = [model for model in models if model is not next_model and model.kept_in == MEMORY]
    for model in sorted(sleeping, key=lambda one: one.left_s):
        if machine.available_bytes() >= needed_bytes(next_model, settings):
            return
        log.info("memory is short: the weights of %s are on disk only", model.pool)
        model.end()


def needed_bytes(model: ServedModel, settings: Settings) -> int:
    """Memory of the host that a model takes when it wakes: its cache if that is there, and the rest if it is
    not in memory.
    """
    cache_bytes = settings.cpu_cache_bytes if settings.device == "cpu" else 0
    return cache_bytes if model.kept_in == MEMORY else cache_bytes + ENGINE_BYTES + model.weight_bytes()


LOOK_S = 0.1
"""Time between two looks at what waits."""
MIN_PATIENCE_S = 1.0
"""Rows get as long as the swap takes to end, and at least this."""


class Swapper:
    """The models of one worker, one of which is awake: often the only one.

    Attributes:
        preloaded: processes that become ranks of the first engine.
        incarnation: of the next stay.
        draining, signalled: as in AgentState, for all stays.
        between_stays: the worker is in no pool.
        next: the pool that is served next.
    """

    def __init__(
        self,
        settings: Settings,
        own: ProcessIdentity,
        environ: Mapping[str, str],
        ranks: Sequence[RankInfo],
        preloaded: Sequence[RankProcess],
    ) -> None:
        self.settings = settings
        self.own = own
        self.preloaded = preloaded
        self.client = PoolClient.connect(settings)
        self.models = {
            pool: ServedModel(settings.of_pool(pool), self.client.of_pool(pool), environ, ranks)
            for pool in settings.pools
        }
        self.incarnation = own.incarnation
        self.draining = asyncio.Event()
        self.signalled = asyncio.Event()
        self.between_stays = asyncio.Event()
        self.between_stays.set()
        self.next = settings.pool

    def begin_shutdown(self) -> None:
        """A signal asks the worker to end."""
        self.signalled.set()
        self.draining.set()

    async def run(self) -> int:
        """Serve one model after the other until the worker is drained or fails → the exit status. Raises
        SettingError if not even the first model can be served.
        """
        async with self.client, self.sending_heartbeats():
            try:
                await self.choose_first()
                await run_until_one_ends(self.serve_in_turns(), self.end_between_stays())
                return 0
            except (Sealed, EngineDied, EngineStuck) as error:
                log.error("%s: %s", type(error).__name__, error)
                return 1
            finally:
                for model in self.models.values():
                    model.end()

    async def serve_in_turns(self) -> None:
        """Serve one model after the other until the worker is drained. Raises SettingError, Sealed,
        EngineDied, EngineStuck.
        """
        while not self.draining.is_set():
            model = self.models[self.next]
            if (agent := await self.join(model)) is not None:
                await self.serve(model, agent)

    async def end_between_stays(self) -> None:
        """Return once the worker is to end and is in no pool; a stay ends by itself."""
        await self.draining.wait()
        await self.between_stays.wait()

    async def join(self, model: ServedModel) -> Agent | None:
        """Wake a model → its agent. If it cannot be woken, another one is next. Raises EngineDied or
        SettingError if none can.
        """
        keep_room(model, self.models.values(), self.settings)
        preloaded, self.preloaded = self.preloaded, ()
        try:
            engine, worker = await model.wake(self.own.name, self.incarnation, preloaded)
        except (EngineDied, SettingError) as error:
            now_s = time.monotonic()
            left = [pool for pool, one in self.models.items() if one is not model and one.retry_s <= now_s]
            if not left:
                raise
            model.note_failure(error)
            self.next = left[0]
            return None
        assert model.state is not None
        model.state = replace(
            model.state.next_incarnation(), draining=self.draining, signalled=self.signalled
        )
        for number in (signal.SIGTERM, signal.SIGINT):  # before the first stay they end the process at once
            asyncio.get_running_loop().add_signal_handler(number, self.begin_shutdown)
        return Agent(model.settings, model.client, engine, model.state, worker)

    async def serve(self, model: ServedModel, agent: Agent) -> None:
        """Serve a model until the worker is drained or another is next. Raises Sealed, EngineDied,
        EngineStuck.
        """
        self.between_stays.clear()
        try:
            if len(self.models) > 1:
                await self.note_swap(model)
                await agent.serve(self.leave(model, agent))
            else:
                await agent.serve()
            if model.engine and model.is_spread:  # it is drained: other machines end in order, too
                await model.engine.end()
        finally:
            model.left_s = time.monotonic()
            self.incarnation = next_incarnation(agent.worker.incarnation)
            self.between_stays.set()
        if not self.draining.is_set():
            await agent.stop_rows()  # their batcher resumes them
            model.state = agent.state
            await model.sleep()
        model.doing = "asleep"

    async def note_swap(self, model: ServedModel) -> None:
        """Tell operators and other workers that a model is awake."""
        swap_s = model.swap_ms[model.woken_from] / 1000
        log.info("%s is awake: woken from %s in %.2f s", model.pool, model.woken_from, swap_s)
        catalogue.MODEL_SWAP.observe(swap_s, model.woken_from)
        with contextlib.suppress(*ERRORS):
            await model.client.redis.pexpire(model.client.keys.waking, TOLD_MS, lt=True)

    async def leave(self, model: ServedModel, agent: Agent) -> None:
        """Return once another model is next, and the rows of this one have had time to end."""
        self.next = await self.wait_for_other(model, agent)
        other = self.models[self.next]
        log.info("%s is next (from %s): %s takes no more rows", self.next, other.kept_in, model.pool)
        agent.leave()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(MIN_PATIENCE_S, other.swap_s)):
                await agent.state.idle.wait()

    # --- what is next ---------------------------------------------------------------------------------------

    async def choose_first(self) -> None:
        """Choose the model to serve first: one that is waited for, else one for each worker of a machine."""
        if len(self.models) == 1:
            return
        number = int("".join(filter(str.isdigit, self.own.name)) or 0)
        self.next = self.settings.pools[number % len(self.settings.pools)]
        with contextlib.suppress(*ERRORS):
            demands = await self.read_demands()
            first = choose(PoolDemand(""), [*demands.values()], math.inf, math.inf)
            if first and await self.claim(first):
                self.next = first

    async def wait_for_other(self, model: ServedModel, agent: Agent) -> str:
        """Wait until another model is to be served → its pool."""
        joined_s = busy_s = time.monotonic()
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                demands = await self.read_demands()
            except ERRORS as error:
                log.debug("what waits is not known: %s", describe_error(error))
                continue
            own, now_s = demands.pop(model.pool), time.monotonic()
            if own.num_waiting or not agent.state.idle.is_set():
                busy_s = now_s
            other = choose(own, [*demands.values()], now_s - joined_s, now_s - busy_s)
            if other and await self.claim(other):
                return other

    async def read_demands(self) -> dict[str, PoolDemand]:
        """What each model is asked for: nothing where its pool has no batcher."""
        async with self.client.redis.pipeline(transaction=False) as pipe:
            for pool in self.models:
                pipe.hmget(Keys(pool).state, COUNTS)
            found = await pipe.execute()
        counts = [
            {name: int(value) for name, value in zip(COUNTS, values, strict=True) if value}
            for values in found
        ]
        return {
            model.pool: model.demand(own) for model, own in zip(self.models.values(), counts, strict=True)
        }

    async def claim(self, pool: str) -> bool:
        """Claim a pool → whether no other worker wakes its model at this moment. A claim expires when its
        worker should have joined.
        """
        redis, key, own = self.client.redis, Keys(pool).waking, self.own.incarnation
        ttl_ms = round(1000 * (2 * self.models[pool].swap_s + CLAIM_SPARE_S))
        if await redis.set(key, own, nx=True, px=ttl_ms):
            return True
        return bool(await redis.get(key) == own.encode())

    @contextlib.asynccontextmanager
    async def sending_heartbeats(self) -> AsyncIterator[None]:
        """Tell all pools that this worker serves them in turns, while the context is open."""
        async with contextlib.AsyncExitStack() as stack:
            for model in self.models.values() if len(self.models) > 1 else ():
                beat = Heartbeat(model.client, SLEEPER, self.own.incarnation, self.settings.worker_ttl_s)
                await stack.enter_async_context(beat.sending(self.settings.heartbeat_s, model.describe))
            yield
