"""PoolClient: one pool at the broker: the connection to it, and the names of the pool's keys."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis

from common.broker.client import broker_url, connect, script
from common.broker.fast_client import Argument
from common.broker.keys import Keys
from common.settings.settings import Settings


@dataclass(frozen=True, slots=True)
class PoolClient:
    """As a context, it closes its connections at the end."""

    redis: Redis
    keys: Keys

    @classmethod
    def connect(cls, settings: Settings) -> "PoolClient":
        """Raises SettingError where no broker is set."""
        return cls(connect(broker_url(settings)), Keys(settings.pool))

    async def __aenter__(self) -> "PoolClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.redis.aclose()

    async def run(self, name: str, keys: Sequence[str], args: Sequence[Argument]) -> Any:
        """Return what a script returns; the broker is sent a script that it does not know."""
        return await script(self.redis, name)(keys=keys, args=args)

    async def seal(self, worker: str, why: str) -> bool:
        """Seal a worker's logs: nothing can be appended any more. Return whether they exist."""
        keys = [self.keys.log(worker), self.keys.reports(worker), self.keys.worker(worker), self.keys.workers]
        return bool(await self.run("seal", keys, [worker, why]))

    async def workers(self) -> list[str]:
        """Incarnations of workers, some of which may have died."""
        return [member.decode() for member in await self.redis.zrange(self.keys.workers, 0, -1)]

    async def processes(self, kind: str) -> list[str]:
        """Names of the processes of one kind, other than `worker`; some of them may have died."""
        members = [member.decode() for member in await self.redis.zrange(self.keys.processes, 0, -1)]
        return [member.removeprefix(f"{kind}:") for member in members if member.startswith(f"{kind}:")]
