"""Pool client: the connection to a pool's broker, and what all processes read of the pool, its time above
all.

Whatever several processes compare (deadlines, expiries, ages) is told by the broker's clock: a machine's own
clock may be wrong. `time.time()` is for logs and traces alone.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from redis.asyncio import Redis

from common.broker.client import broker_url, connect
from common.broker.keys import Keys
from common.broker.lua import Reply, ScriptCall, run_script
from common.settings.settings import Settings

VERSION = "version"
"""Field of a hash with records that many processes watch: its value changes with each change of them."""


class ChangeRefused(Exception):
    """A change of such records that is refused. `str()` is the one line that a person sees.

    Attributes:
        is_unknown: there is no such record.
    """

    def __init__(self, text: str, is_unknown: bool = False) -> None:
        super().__init__(text)
        self.is_unknown = is_unknown


class BrokerClock:
    """The broker's clock, extrapolated from the last look at it.

    Attributes:
        offset_s: that clock minus the monotonic one; None before the first look.
    """

    def __init__(self) -> None:
        self.offset_s: float | None = None

    def note(self, now_s: float) -> None:
        """Note what the broker has just said."""
        self.offset_s = now_s - time.monotonic()

    def now_s(self) -> float:
        """Unix time; by this machine's clock before the first look."""
        return time.time() if self.offset_s is None else time.monotonic() + self.offset_s


class WorkerLook(NamedTuple):
    """What the broker says of workers.

    Attributes:
        heartbeats: incarnation → values of the fields that were read.
        seen_ms: incarnation in the pool → time of its last heartbeat, by the broker's clock.
        now_ms: what that clock shows.
    """

    heartbeats: dict[str, list[bytes | None]]
    seen_ms: dict[str, float]
    now_ms: float


@dataclass(frozen=True, slots=True)
class PoolClient:
    """The connection to a pool's broker, its clock, and the names of the pool's keys. As a context, it closes
    its connections at the end.
    """

    redis: Redis
    keys: Keys
    clock: BrokerClock = field(default_factory=BrokerClock)

    @classmethod
    def connect(cls, settings: Settings) -> "PoolClient":
        """Raises SettingError where no broker is set."""
        return cls(connect(broker_url(settings)), Keys(settings.pool))

    def of_pool(self, pool: str) -> "PoolClient":
        """Another pool of the same broker, over the same connection."""
        return PoolClient(self.redis, Keys(pool), self.clock)

    async def __aenter__(self) -> "PoolClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.redis.aclose()

    async def run(self, call: ScriptCall[Reply]) -> Reply:
        """Return what a script's reply means; the broker is sent a script that it does not know."""
        return await run_script(self.redis, call)

    async def read_time(self) -> float:
        """Ask the broker for the time; return Unix time in s."""
        seconds, microseconds = await self.redis.time()
        self.clock.note(seconds + microseconds / 1e6)
        return self.clock.now_s()

    async def read_version(self, key: str) -> bytes:
        """Return the version of the records in a hash; empty where there are none."""
        return await self.redis.hget(key, VERSION) or b""  # type: ignore[misc]

    async def sealed(self) -> list[str]:
        """Return the incarnations that are sealed, and whose other keys are not deleted yet."""
        members = await self.redis.smembers(self.keys.sealed)  # type: ignore[misc]
        return sorted(member.decode() for member in members)

    async def workers(self) -> list[str]:
        """Return the incarnations of workers, some of which may have died."""
        return [member.decode() for member in await self.redis.zrange(self.keys.workers, 0, -1)]

    async def look_at_workers(self, names: Iterable[str], fields: list[str]) -> WorkerLook:
        """Read the heartbeats of these workers and of all in the pool; in one round trip if these are all."""
        wanted = sorted({*names})
        while True:
            async with self.redis.pipeline(transaction=False) as pipe:
                for name in wanted:
                    pipe.hmget(self.keys.worker(name), fields)
                pipe.zrange(self.keys.workers, 0, -1, withscores=True)
                pipe.time()  # after them: a jump of the clock that made a heartbeat expire is seen
                *hashes, members, (now_s, now_us) = await pipe.execute()
            self.clock.note(now_s + now_us / 1e6)
            seen_ms = {member.decode(): at_ms for member, at_ms in members}
            if seen_ms.keys() <= {*wanted}:
                return WorkerLook(
                    dict(zip(wanted, hashes, strict=True)), seen_ms, now_s * 1000 + now_us / 1000
                )
            wanted = sorted({*wanted, *seen_ms})

    async def publish(self, messages: Iterable[tuple[str, bytes]]) -> None:
        """Publish the payload of each (channel, payload), in one round trip."""
        async with self.redis.pipeline(transaction=False) as pipe:
            for channel, payload in messages:
                pipe.publish(channel, payload)
            await pipe.execute()

    async def processes(self, kind: str) -> dict[str, float]:
        """Return name → time of the last heartbeat (ms) of the processes of one kind, other than `worker`;
        some may have died.
        """
        found = await self.redis.zrange(self.keys.processes, 0, -1, withscores=True)
        members = [(*member.decode().partition(":"), at_ms) for member, at_ms in found]
        return {name: at_ms for its_kind, _, name, at_ms in members if its_kind == kind}
