"""Access to the broker (Redis 7 or later, or Valkey): connections, causes of errors in one line, the Lua
scripts.
"""

import asyncio
import functools
import os
import re
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import hiredis
import redis.asyncio
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    InvalidResponse,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
)

from common.settings.settings import SettingError, Settings

CONNECT_TIMEOUT_S = 5.0
OLDEST = (7, 0)
SCRIPTS = Path(__file__).parents[1] / "scripts"
ERRORS = (RedisError, OSError)
"""What a command may raise while the broker is away or refuses; `cause` puts any of them into words."""

Script = Callable[..., Awaitable[Any]]


def connect(url: str, **options: Any) -> redis.asyncio.Redis:
    """A client with a pool of its own; no connection is made yet. Replies are bytes.

    A command waits for its answer for as long as the connection lives (XREAD may block), and is never
    repeated by the client: callers retry, scripts are safe to repeat. A peer that vanished is noticed by
    keep-alive probes within about 11 s.
    """
    defaults: dict[str, Any] = {"socket_connect_timeout": CONNECT_TIMEOUT_S}
    if not url.startswith("unix:"):
        defaults |= {"socket_keepalive": True, "socket_keepalive_options": keepalive()}
    client: redis.asyncio.Redis = redis.asyncio.Redis.from_url(url, **(defaults | options))
    pool = client.connection_pool
    pool.connection_class = quick(pool.connection_class)
    return client


def quick(kind: type[AbstractConnection]) -> type[AbstractConnection]:
    """A kind of connection that words commands in C; redis-py does so only in its other clients."""

    def pack_command(_: AbstractConnection, *words: Any) -> list[bytes]:
        return [
            hiredis.pack_command((*words[0].split(), *words[1:]))
        ]  # some of its commands' names are two words

    return type(f"Quick{kind.__name__}", (kind,), {"pack_command": pack_command})


def keepalive() -> dict[int, int]:
    wanted = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 11_000}
    return {getattr(socket, name): value for name, value in wanted.items() if hasattr(socket, name)}


def describe_error(error: BaseException) -> str:
    """An error of the broker or of the way to it, in one line, without passwords."""
    text = re.sub(r"//[^@\s]*@", "//", " ".join(str(error).split()))[:200]
    text = re.sub(
        r"Error (\d+) connecting to (\S+)\. .*",
        lambda found: f"{found[2]}: {os.strerror(int(found[1]))}",
        text,
    )
    match error:
        case AuthenticationError():
            return f"the broker refused user name or password ({text})"
        case OutOfMemoryError():
            return f"the broker is out of memory ({text})"
        case BusyLoadingError():
            return "the broker is loading its data (LOADING)"
        case ReadOnlyError():
            return "the broker is a read-only replica (READONLY)"
        case TimeoutError() | redis.exceptions.TimeoutError():
            return f"the broker did not answer in time{f' ({text})' if text else ''}"
        case InvalidResponse():
            return f"what answers is not a broker ({text})"
        case OSError() | redis.exceptions.ConnectionError():
            return f"no connection to the broker ({text or type(error).__name__})"
        case _:
            return f"the broker refused ({text or type(error).__name__})"


def url_of(settings: Settings) -> str:
    """Where a fleet's broker is. Raises SettingError where nobody says."""
    if settings.redis_url is None:
        raise SettingError(
            "redis_url", "is not set: processes of a fleet meet at a broker, as in redis://127.0.0.1:6379"
        )
    return settings.redis_url


async def check(url: str) -> None:
    """Raises SettingError, within CONNECT_TIMEOUT_S, when no broker that we can work with answers at `url`."""
    try:
        client = connect(url)
    except ValueError as error:  # its text may hold the password
        raise SettingError(
            "redis_url", "is not a URL like redis://[user:password@]host:port/db (also rediss://, unix://)"
        ) from error
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            server = await client.info("server")
    except ERRORS as error:
        raise SettingError("redis_url", describe_error(error)) from error
    finally:
        await client.aclose()
    version = str(server.get("redis_version", "0.0"))
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < OLDEST:
        raise SettingError(
            "redis_url", f"the broker speaks Redis {version}; {OLDEST[0]}.{OLDEST[1]} or later is needed"
        )


@functools.cache
def load(name: str) -> str:
    """Text of `common/scripts/{name}.lua`, after the scripts that its first line `-- needs: one, other`
    names.
    """
    text = (SCRIPTS / f"{name}.lua").read_text()
    needs = re.match(r"-- needs: ([\w/, ]+)\n", text)
    return "".join(load(other) + "\n" for other in (re.findall(r"[\w/]+", needs[1]) if needs else ())) + text


def script(client: redis.asyncio.Redis, name: str) -> Script:
    """The script as a callable: `await call(keys=…, args=…)` runs EVALSHA, and sends the text where the
    broker does not know it.
    """
    registered: Script = client.register_script(load(name))
    return registered
