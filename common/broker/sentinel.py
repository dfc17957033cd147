"""Sentinel client: connections to the primary that Redis Sentinel names; after a failover, to the new one.

Its URL is `redis+sentinel://[user:password@]host[:port],host[:port]/service[/db][?options]`. With
`rediss+sentinel` brokers and sentinels have TLS. Options are those of redis-py's other URLs, and
`sentinel_username` and `sentinel_password`.
"""

from typing import Any
from urllib.parse import urlsplit

import redis.asyncio
from redis.asyncio.connection import SSLConnection, parse_url
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool

SCHEMES = ("redis+sentinel", "rediss+sentinel")
SENTINEL_PORT = 26379
TIMEOUTS = {"socket_connect_timeout": 1.0, "socket_timeout": 1.0}
"""Of one sentinel: the next one is asked while the caller still waits."""


class SentinelPool(SentinelConnectionPool):
    """Closes the connections to the sentinels with its own."""

    async def disconnect(self, inuse_connections: bool = True) -> None:
        await super().disconnect(inuse_connections)
        if inuse_connections:  # else it only leaves a primary that is none any more
            for sentinel in self.sentinel_manager.sentinels:
                await sentinel.aclose()


def is_sentinel_url(url: str) -> bool:
    return url.partition("://")[0].lower() in SCHEMES


def connect(url: str, **options: Any) -> redis.asyncio.Redis:
    """Return a client of the primary. Raises ValueError when the URL cannot be read."""
    scheme, _, rest = url.partition("+sentinel://")
    address, _, query = rest.partition("?")
    authority, _, path = address.partition("/")
    credentials, _, hosts = authority.rpartition("@")
    service, _, database = path.partition("/")
    if not hosts or not service:
        raise ValueError("no sentinel, or no name of what it watches")
    given: dict[str, Any] = options | dict(parse_url(f"{scheme}://{credentials}@sentinel/{database}?{query}"))
    del given["host"]
    has_tls = given.pop("connection_class", None) is SSLConnection
    own = {name: given.pop(f"sentinel_{name}", None) for name in ("username", "password")}
    shared = {name: value for name, value in given.items() if name.startswith(("socket_", "ssl_"))}
    watchers = Sentinel(  # type: ignore[no-untyped-call]
        [read_address(host) for host in hosts.split(",")],
        sentinel_kwargs=shared | TIMEOUTS | own | ({"ssl": True} if has_tls else {}),
    )
    primary: redis.asyncio.Redis = watchers.master_for(
        service, connection_pool_class=SentinelPool, ssl=has_tls, **given
    )
    return primary


def read_address(text: str) -> tuple[str, int]:
    """Return host and port of `host`, `host:port`, `[::1]` or `[::1]:port`."""
    parts = urlsplit(f"//{text}")
    if not parts.hostname:
        raise ValueError("a sentinel without a host")
    return parts.hostname, parts.port or SENTINEL_PORT
