"""PoolClient: one pool at the broker: the connection to it, and the names of the pool's keys."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from redis.asyncio import Redis
from redis.typing import EncodableT

from common.broker.client import Script, broker_url, connect, script
from common.broker.keys import STREAMS_TTL_MS, Keys
from common.settings.settings import Settings


class WorkerLook(NamedTuple):
    """What the broker says of workers.

    Attributes:
        heartbeats: by incarnation: the values of the fields that were read.
        seen_ms: of each that is in the pool: when it sent the last one, by the broker's clock.
        now_ms: what that shows.
    """

    heartbeats: dict[str, list[bytes | None]]
    seen_ms: dict[str, float]
    now_ms: float


@dataclass(frozen=True, slots=True)
class PoolClient:
    """The connection to a pool's broker, and the names of the pool's keys. As a context, it closes its
    connections at the end.

    Attributes:
        scripts: by name, those that were run: the text of each is hashed once.
    """

    redis: Redis
    keys: Keys
    scripts: dict[str, Script] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def connect(cls, settings: Settings) -> "PoolClient":
        """Raises SettingError where no broker is set."""
        return cls(connect(broker_url(settings)), Keys(settings.pool))

    async def __aenter__(self) -> "PoolClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.redis.aclose()

    async def run(self, name: str, keys: Sequence[str], args: Sequence[EncodableT]) -> Any:
        """Return what a script returns; the broker is sent a script that it does not know."""
        if name not in self.scripts:
            self.scripts[name] = script(self.redis, name)
        return await self.scripts[name](keys=keys, args=args)

    async def seal(self, worker: str, why: str) -> bool:
        """Seal a worker's logs: nothing can be appended any more. Return whether they exist."""
        keys, own = self.keys, self.keys.worker(worker)
        names = [keys.log(worker), keys.reports(worker), own, keys.workers, keys.sealed]
        return bool(await self.run("seal", names, [worker, why, STREAMS_TTL_MS]))

    async def sealed(self) -> list[str]:
        """Incarnations that are sealed, and whose other keys are not deleted yet."""
        members = await self.redis.smembers(self.keys.sealed)  # type: ignore[misc]
        return sorted(member.decode() for member in members)

    async def workers(self) -> list[str]:
        """Incarnations of workers, some of which may have died."""
        return [member.decode() for member in await self.redis.zrange(self.keys.workers, 0, -1)]

    async def look_at_workers(self, names: Iterable[str], fields: list[str]) -> WorkerLook:
        """Read heartbeats of these workers and of those in the pool, in one round trip if these are all."""
        wanted = sorted({*names})
        while True:
            async with self.redis.pipeline(transaction=False) as pipe:
                for name in wanted:
                    pipe.hmget(self.keys.worker(name), fields)
                pipe.zrange(self.keys.workers, 0, -1, withscores=True)
                pipe.time()  # after them: a jump of the clock that made a heartbeat expire is seen
                *hashes, members, (now_s, now_us) = await pipe.execute()
            seen_ms = {member.decode(): at_ms for member, at_ms in members}
            if seen_ms.keys() <= {*wanted}:
                return WorkerLook(
                    dict(zip(wanted, hashes, strict=True)), seen_ms, now_s * 1000 + now_us / 1000
                )
            wanted = sorted({*wanted, *seen_ms})

    async def processes(self, kind: str) -> dict[str, float]:
        """Name of each process of one kind, other than `worker` → when its last heartbeat came (ms); some of
        them may have died.
        """
        found = await self.redis.zrange(self.keys.processes, 0, -1, withscores=True)
        members = [(*member.decode().partition(":"), at_ms) for member, at_ms in found]
        return {name: at_ms for its_kind, _, name, at_ms in members if its_kind == kind}
