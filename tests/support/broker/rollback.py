"""A broker that loses what was written last: set back in place, or restarted from a copy of its files."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from redis.asyncio import Redis

from deploy.launcher.embedded_broker import Broker, embedded
from tests.support import brokers


class Snapshot(dict[bytes, bytes]):
    """All keys of a broker at one time. Restored keys do not expire."""

    @classmethod
    async def of(cls, redis: Redis) -> "Snapshot":
        return cls({key: await redis.dump(key) for key in await redis.keys("*")})

    async def restore(self, redis: Redis) -> None:
        """Set the broker back, in one transaction. Its connections stay open."""
        async with redis.pipeline(transaction=True) as pipe:
            pipe.flushall()
            for key, value in self.items():
                pipe.restore(key, 0, value)
            await pipe.execute()


class RestorableBroker:
    """A broker that can be killed, and started from an earlier copy of its append-only file."""

    def __init__(self, broker: Broker, copy: Path) -> None:
        self.broker = broker
        self.files = broker.directory / "appendonlydir"
        self.copy = copy
        self.process = brokers.start(broker)

    def keep(self) -> None:
        """Copy the files as they are now; every answered write is in them."""
        shutil.rmtree(self.copy, ignore_errors=True)
        shutil.copytree(self.files, self.copy)

    def restore(self) -> None:
        """Start from the copy: later writes are lost. The server dies with the thread that calls this."""
        self.kill()
        shutil.rmtree(self.files)
        shutil.copytree(self.copy, self.files)
        self.process = brokers.start(self.broker, "--aof-load-truncated", "yes")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def restorable() -> Iterator[RestorableBroker]:
    with embedded() as broker, TemporaryDirectory() as copy:
        restorable_broker = RestorableBroker(broker, Path(copy) / "kept")
        try:
            yield restorable_broker
        finally:
            restorable_broker.kill()
