"""Public hosts: how a gateway connects to a URL that a client has named.

The address of a host is resolved and checked once, where the connection is made, and that address is
connected to: a name that resolves to another address the next time gains nothing.
"""

import asyncio
from collections.abc import Iterable
from typing import Any

import httpcore

from api.outbound.addresses import public_addresses


class PublicHosts(httpcore.AsyncNetworkBackend):
    """Connects to public addresses only, and to hosts that a setting itself names."""

    def __init__(self, named: Iterable[str]) -> None:
        self.named = frozenset(named)
        self.backend = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Connect to the first address that answers. Raises UrlError."""
        *others, last = await public_addresses(host, port, self.named)
        options = timeout, local_address, socket_options
        for address in others:
            try:
                return await self.backend.connect_tcp(address, port, *options)
            except (httpcore.ConnectError, httpcore.ConnectTimeout):
                continue
        return await self.backend.connect_tcp(last, port, *options)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
