"""Failure detector: which workers are dead, which are silent, and for how long the pool has had none.

A worker without a heartbeat is dead. But heartbeats are also missing after the broker was away or slow, after
its clock jumped, and after this process was stopped. Then no worker is declared dead until each has had time
for a new heartbeat.

A worker that has a heartbeat is silent if it does not say what it owes: an answer to a takeover and, while it
has rows, reports, at least one a second however long a step takes, which show the plans that it has seen. Its
agent says all that, not its engine: for an engine that hangs, or computes or compiles for long, there is the
agent's own watchdog.
"""

import logging
import time
from collections.abc import Callable, Mapping

from common.broker.keys import SLEEPER, STARTING
from common.broker.pool_client import PoolClient

log = logging.getLogger(__name__)

CLOCK_JUMP_MS = 1000
STALL_S = 2.0
"""Time between two checks after which heartbeats may be missing: checks come every HEARTBEAT_S."""


class FailureDetector:
    """Active unless it was paused less than `ttl_s` ago. It is paused until then from its first check on.

    Attributes:
        resumes_s: monotonic time at which the pause ends.
        clock_offset_ms: the broker's clock minus the monotonic clock, as last seen.
        checked_s: monotonic time of the last `check_stall`.
    """

    def __init__(self, ttl_s: float) -> None:
        self.ttl_s = ttl_s
        self.clock_offset_ms: float | None = None
        self.checked_s = time.monotonic()
        self.resumes_s = 0.0
        self.pause()

    def pause(self) -> None:
        self.resumes_s = time.monotonic() + self.ttl_s

    @property
    def active(self) -> bool:
        return time.monotonic() >= self.resumes_s

    def is_dead(self, has_heartbeat: bool, seen_ms: float, now_ms: float) -> bool:
        """Whether a worker is dead whose last heartbeat came at `seen_ms`. A time in the future does not
        count: the broker's clock has gone back since, so the heartbeat would last too long.
        """
        return self.active and not (has_heartbeat and seen_ms <= now_ms)

    def check_stall(self) -> None:
        """Pause if the last check is long ago: the broker was busy, or this process was stopped."""
        now_s = time.monotonic()
        if now_s - self.checked_s > STALL_S:
            log.warning("no reply from the broker for %.1f s", now_s - self.checked_s)
            self.pause()
        self.checked_s = now_s

    def check_clock_jump(self, now_ms: float) -> None:
        """Pause if the broker's clock, which expires heartbeats, has jumped, or may have jumped before the
        first check.
        """
        offset_ms = now_ms - time.monotonic() * 1000
        if self.clock_offset_ms is None:
            self.pause()
        elif abs(offset_ms - self.clock_offset_ms) > CLOCK_JUMP_MS:
            log.warning("the broker's clock jumped by %.1f s", (offset_ms - self.clock_offset_ms) / 1000)
            self.pause()
        self.clock_offset_ms = offset_ms

    def now_ms(self) -> int:
        """The broker's clock, extrapolated from the last check."""
        return round(time.monotonic() * 1000 + (self.clock_offset_ms or 0.0))


class WorkerAbsence:
    """How long the pool has had no worker, not even one that is starting, or serves another pool
    in its turn.

    Attributes:
        since_s: monotonic time of the first look without one; None while there is one.
    """

    def __init__(self, pool: PoolClient, grace_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.pool = pool
        self.grace_s = grace_s
        self.clock = clock
        self.since_s: float | None = None

    async def is_over_grace(self, has_worker: bool) -> bool:
        """Whether the pool has had no worker for longer than WORKER_GRACE_S."""
        if has_worker or await self.is_one_coming():
            self.since_s = None
            return False
        self.since_s = self.clock() if self.since_s is None else self.since_s
        return self.clock() - self.since_s > self.grace_s

    async def is_one_coming(self) -> bool:
        keys = [
            self.pool.keys.process(kind, name)
            for kind in (STARTING, SLEEPER)
            for name in await self.pool.processes(kind)
        ]
        return bool(keys) and bool(await self.pool.redis.exists(*keys))


Debt = tuple[str, str]
"""A worker, and what it owes."""
SILENT_S = 10.0
"""A worker that has been silent for so long is called that."""
LOST_S = 60.0
"""One that has been silent for so long is sealed. Its agent gives a connection that hangs up before that, and
may write the logits of many tokens before the next report.
"""


class Silence:
    """For how long each worker has been silent.

    Attributes:
        since: each debt, with what was last heard of it, and when.
    """

    def __init__(self) -> None:
        self.since: dict[Debt, tuple[int, float]] = {}

    def look(self, debts: Mapping[Debt, int], now_s: float) -> None:
        """Note what is owed now, with what was last heard of it. A debt of which something else was heard
        begins anew.
        """
        last = self.since
        self.since = {
            debt: last[debt] if debt in last and last[debt][0] == heard else (heard, now_s)
            for debt, heard in debts.items()
        }

    def workers(self, seconds: float, now_s: float) -> set[str]:
        """Return the workers that have been silent for so long."""
        return {worker for (worker, _), (_, since_s) in self.since.items() if now_s - since_s >= seconds}
