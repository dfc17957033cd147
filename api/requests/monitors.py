"""Monitors: what a gateway knows of a pool's workers and of its active batcher, as it last read it."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from api.errors import LOADING_S, invalid, unavailable
from api.requests.validate import Limits
from common.adapter_registry import AdapterRegistry, change_registry, read_registry
from common.adapters import HeldAdapters, PoolAdapter
from common.broker.client import CONNECT_TIMEOUT_S, ERRORS, FailureLog, describe_error
from common.broker.heartbeat import Heartbeat
from common.broker.keys import LEASE_S
from common.broker.pool_client import ChangeRefused, PoolClient
from common.messages.codec import WireError, decode
from common.messages.plan import WorkerCapacity
from common.pooling import PoolingConfig
from common.process.event_loop import until_beat
from common.settings.settings import Settings

log = logging.getLogger(__name__)
FRESH_S = 0.05
TTL_SHARE = 0.8
"""Share of WORKER_TTL_S after which a gateway's heartbeat expires; in the rest of it others claim its jobs.
"""
SILENT_S = 2 * LEASE_S
"""A batcher whose last heartbeat is older does not work. A successor takes over within this time."""


class Monitor:
    """What a gateway reads again and again, at an interval.

    Attributes:
        checked_s: monotonic time of the last read.
        last_error: why the last read failed; empty if it succeeded.
    """

    def __init__(self, interval_s: float, what: str) -> None:
        self.interval_s = interval_s
        self.checked_s = 0.0
        self.last_error = "not connected to the broker yet"
        self.failures = FailureLog(log, f"reading {what}")
        self.refresh_lock = asyncio.Lock()

    async def run(self) -> None:
        """Never returns."""
        while True:
            await self.refresh()
            await asyncio.sleep(until_beat(self.interval_s))

    async def read(self) -> None:
        """Read once. Raises one of ERRORS."""
        raise NotImplementedError

    async def refresh(self) -> None:
        """Read once; a failure is logged."""
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await self.read()
            self.last_error = ""
            self.failures.succeeded()
        except ERRORS as error:
            self.last_error = describe_error(error)
            self.failures.failed(error)
        self.checked_s = time.monotonic()

    async def refresh_unless_fresh(self) -> None:
        """Refresh, unless that was done within FRESH_S."""
        async with self.refresh_lock:
            if time.monotonic() - self.checked_s > FRESH_S:
                await self.refresh()


class WorkerMonitor(Monitor):
    """Reads the state of the workers at every heartbeat interval, and sends the gateway's own heartbeat. The
    limits of workers that died are kept.

    Attributes:
        ready_s: monotonic time of the last heartbeat of a worker that was ready; None before there was one.
        longest: tokens of a request, until there was a worker; 0 accepts none.
        ready: what the ready workers say of themselves, as long as there are some.
        state: of the gateway, as its heartbeat shows it: `ready`, `draining`.
        names: incarnations that were there at the last read.
        num_ready: workers that were ready at the last read.
        holders: of those that serve adapters, the adapters that each of them has.
        pooling: how the pool's model pools; None if it generates.
    """

    def __init__(
        self,
        client: PoolClient,
        gateway: str,
        settings: Settings,
        num_streams: Callable[[], int],
        longest: int = 0,
        pooling: PoolingConfig | None = None,
    ) -> None:
        super().__init__(settings.heartbeat_s, "the workers")
        self.client = client
        self.settings = settings
        self.heartbeat = Heartbeat(client, "gateway", gateway, TTL_SHARE * settings.worker_ttl_s)
        self.num_streams = num_streams
        self.pooling = pooling
        self.ready_s: float | None = None
        self.longest = longest
        self.ready: list[WorkerCapacity] = []
        self.state = "ready"
        self.names: list[str] = []
        self.num_ready = 0
        self.holders: dict[str, HeldAdapters] = {}

    async def read(self) -> None:
        """Send one heartbeat, with the number of streams and tasks, and read the workers once."""
        num_streams, num_tasks = self.num_streams(), len(asyncio.all_tasks())
        heartbeat = self.heartbeat.send(state=self.state, streams=num_streams, tasks=num_tasks)
        await asyncio.gather(heartbeat, self.read_workers())

    async def read_workers(self) -> None:
        """Read the workers, and note what the ready ones say, but for those that the batcher refuses."""
        names: Any = self.client.redis.hget(self.client.keys.state, "refused")
        look = self.client.look_at_workers(self.names, ["state", "capacity", "adapters"])
        names, (found, seen, now_ms) = await asyncio.gather(names, look)
        refused = (names or b"").decode().split()
        self.names = [*seen]
        ages_s, ready = [], []
        holders: dict[str, HeldAdapters] = {}
        for incarnation, seen_ms in seen.items():
            state, capacity, held = found[incarnation]
            if state != b"ready" or capacity is None or incarnation in refused:
                continue
            try:
                ready.append(decode(WorkerCapacity, capacity))
                ages_s.append(max(0.0, now_ms - seen_ms) / 1000)  # the broker's clock may have gone back
                holders |= {incarnation: decode(HeldAdapters, held)} if held else {}
            except WireError as error:
                log.error("worker %s: %s", incarnation, error)
        self.num_ready = len(ready)
        self.holders = holders
        if ages_s:
            self.ready_s = max(self.ready_s or 0.0, time.monotonic() - min(ages_s))
            self.ready = ready

    def check(self) -> None:
        """Raises ApiError (503) if no worker is ready, or was within WORKER_GRACE_S. With SCALE_TO_ZERO none
        is needed: requests that wait make a scaler start one.
        """
        if self.last_error:
            raise unavailable(self.last_error)
        if self.settings.scale_to_zero:
            return
        if self.ready_s is None:
            raise unavailable("no worker is ready yet", LOADING_S)
        gone_s = time.monotonic() - self.ready_s
        if gone_s > self.settings.worker_grace_s:
            raise unavailable(f"no worker for {gone_s:.0f} s")

    def check_adapter(self, adapter: PoolAdapter) -> None:
        """Raises ApiError (422) if no worker that is ready will serve an adapter."""
        held = self.holders.values()
        if self.num_ready and not held:
            raise invalid(f"The workers of this pool serve no adapters, and so not `{adapter.name}`", "model")
        causes = [one.why_not(adapter) for one in held]
        if causes and all(causes):
            raise invalid(f"The adapter `{adapter.name}` is not served: {causes[0]}", "model")

    @property
    def max_total_tokens(self) -> int:
        """Of the smallest worker; with SCALE_TO_ZERO, until there was one, of the model."""
        return min((worker.max_total_tokens for worker in self.ready), default=self.longest)

    @property
    def adapter_room(self) -> tuple[int, int]:
        """Adapters in one step, and their largest rank, that all workers with adapters serve."""
        serving = [one for one in self.ready if one.max_loras]
        rank = min((one.max_lora_rank for one in serving), default=0)
        return min((one.max_loras for one in serving), default=0), rank

    @property
    def limits(self) -> Limits:
        """Limits of a request; valid after `check` succeeded once."""
        most_of_all = self.max_total_tokens
        max_total_tokens = min(self.settings.max_total_tokens or most_of_all, most_of_all)
        pooling, ready = self.pooling, self.ready
        smallest = min(ready, key=lambda worker: worker.num_blocks * worker.block_size, default=None)
        most = min(max_total_tokens, pooling.max_tokens) if pooling else max_total_tokens - 1
        max_input_tokens = min(self.settings.max_input_tokens or most, most)
        return Limits(
            max_input_tokens,
            max_total_tokens,
            self.settings,
            vocab_size=min((worker.vocab_size for worker in ready), default=0),
            dtype=ready[0].dtype if ready else "",
            num_blocks=smallest.num_blocks if smallest else 0,
            block_size=smallest.block_size if smallest else 0,
            pictures=any(worker.pictures for worker in ready)
            or (self.settings.scale_to_zero and self.ready_s is None),
            model_kind=pooling.label if pooling else "",
        )


class BatcherMonitor(Monitor):
    """Reads the lease, and the heartbeat of its holder, at an interval.

    The holder works as long as its heartbeats go on: its loop sends them, between one turn and the next. What
    counts is that a heartbeat has changed, and how long ago by this gateway's own monotonic clock; the
    broker's clock, which may jump, only says how old a heartbeat is when it is first seen.

    Attributes:
        holder: of the lease, as last read; empty without one.
        heartbeat: the holder, and the time of its last heartbeat by the broker's clock.
        worked_s: monotonic time of the last heartbeat of any holder; None before there was one.
        opened_s: monotonic time at which this gateway began to look.
        silent: workers with a heartbeat that do not answer the batcher, as it said last.
    """

    def __init__(self, client: PoolClient, settings: Settings) -> None:
        super().__init__(min(settings.heartbeat_s, LEASE_S / 2), "the batcher's lease")
        self.client = client
        self.settings = settings
        self.holder = ""
        self.heartbeat: tuple[str, float] | None = None
        self.worked_s: float | None = None
        self.opened_s = time.monotonic()
        self.silent: list[str] = []

    async def read(self) -> None:
        name = self.holder
        while (found := await self.read_heartbeat(name))[0] != name:
            name = found[0]
        self.update(*found)

    async def read_heartbeat(self, name: str) -> tuple[str, float | None, float]:
        """The holder, when the last heartbeat of the batcher `name` was, and the present."""
        async with self.client.redis.pipeline(transaction=False) as pipe:
            pipe.get(self.client.keys.batcher)
            pipe.zscore(self.client.keys.processes, f"batcher:{name}")
            pipe.time()
            pipe.hget(self.client.keys.state, "silent")
            holder, seen_ms, (seconds, microseconds), silent = await pipe.execute()
        self.silent = (silent or b"").decode().split()
        return (holder or b"").decode(), seen_ms, seconds * 1000 + microseconds / 1000

    def update(self, holder: str, seen_ms: float | None, now_ms: float) -> None:
        """Note who holds the lease, when its last heartbeat was, and the present, by the broker's clock."""
        now_s = time.monotonic()
        self.holder = holder
        if not holder or seen_ms is None or (holder, seen_ms) == self.heartbeat:
            return
        self.heartbeat = (holder, seen_ms)
        self.worked_s = max(self.worked_s or 0.0, now_s - max(0.0, now_ms - seen_ms) / 1000)

    @property
    def active(self) -> str:
        """The batcher that has the lease and works; empty without one."""
        return self.holder if self.works else ""

    @property
    def works(self) -> bool:
        return self.worked_s is not None and time.monotonic() - self.worked_s <= SILENT_S

    async def check(self) -> None:
        """Raises ApiError (503) if no batcher has worked within SILENT_S. Reads again before that."""
        if not self.works:
            await self.refresh_unless_fresh()
        if not self.works:
            raise unavailable(self.last_error or self.describe())

    async def check_grace(self) -> None:
        """Raises ApiError (503) if no batcher has worked within WORKER_GRACE_S: nobody would end a request
        that is queued now, not even at its deadline.
        """
        if self.gone_s > self.settings.worker_grace_s:
            await self.refresh_unless_fresh()
        if self.gone_s > self.settings.worker_grace_s:
            raise unavailable(self.last_error or self.describe())

    @property
    def gone_s(self) -> float:
        return time.monotonic() - (self.opened_s if self.worked_s is None else self.worked_s)

    def describe(self) -> str:
        if self.worked_s is None:
            return "no batcher is active yet"
        what = f"the active batcher {self.holder} hangs" if self.holder else "no batcher is active"
        return f"{what}: none has worked for {self.gone_s:.0f} s"


class AdapterMonitor(Monitor):
    """Reads the registry of adapters at an interval, when it has changed. A broker that has lost it gets it
    back, so that requests that it has lost, too, go on.

    Attributes:
        seeds: adapters of LORA_ADAPTERS, until the registry has them.
        registry: as it was read last.
    """

    def __init__(self, client: PoolClient, seeds: Sequence[PoolAdapter], interval_s: float) -> None:
        super().__init__(interval_s, "the adapters")
        self.client = client
        self.seeds = seeds
        self.registry = AdapterRegistry()

    def find(self, name: str | None) -> PoolAdapter | None:
        """The adapter that requests get by this name."""
        return self.registry.named(name) if name else None

    async def read(self) -> None:
        known, seeds = self.registry, self.seeds
        version = await self.client.read_version(self.client.keys.adapters)
        if not version and known.version:
            log.warning("the broker has lost the registry of adapters, and gets it back")
            await change_registry(self.client, known.restored)
        if seeds:
            try:
                await change_registry(self.client, lambda found: found.seeded_with(seeds))
                self.seeds = ()
            except ChangeRefused as error:
                log.error("the adapters of LORA_ADAPTERS are not added: %s", error)
        if seeds or version != known.version:
            self.registry = await read_registry(self.client)
