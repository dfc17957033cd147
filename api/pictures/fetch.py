"""Fetch: gets a picture from a public host that a setting allows.

The address of a host is resolved and checked once, where the connection is made, and that address is
connected to: a name that resolves to another address the next time gains nothing.
"""

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import urljoin

import httpcore

from api.pictures.addresses import (
    SETTING,
    PictureUrl,
    check_allowed,
    is_address,
    public_addresses,
    read_url,
)
from common.pictures.layout import PictureError

MAX_REDIRECTS = 3
MAX_CONNECTIONS = 16
"""Of one gateway; further pictures wait."""
REDIRECTS = (301, 302, 303, 307, 308)
KINDS = ("image/", "application/octet-stream", "binary/octet-stream")
"""How content types of pictures begin; stores of objects often know no better."""
HEADERS = [("accept", "image/*"), ("accept-encoding", "identity"), ("user-agent", "tokenfleet")]


class PublicHosts(httpcore.AsyncNetworkBackend):
    """Connects to public addresses only, and to those that the setting itself names."""

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
        """Connect to the first address that answers. Raises PictureError."""
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


class PictureFetcher:
    """Fetches pictures over HTTP, without cookies, proxies and credentials."""

    def __init__(self, domains: Iterable[str], max_bytes: int, timeout_s: float) -> None:
        self.domains = [*domains]
        self.max_bytes = max_bytes
        self.timeout_s = timeout_s
        self.permits = asyncio.Semaphore(MAX_CONNECTIONS)
        hosts = [domain.rpartition(":")[0] or domain for domain in self.domains]
        named = [host.strip("[]") for host in (*hosts, *self.domains) if is_address(host.strip("[]"))]
        self.backend = PublicHosts(named)

    async def fetch(self, url: str) -> bytes:
        """The bytes at a URL. Raises PictureError."""
        if not self.domains:
            raise PictureError(f"must be a data: URL: nothing is fetched here ({SETTING} is empty)")
        try:
            async with asyncio.timeout(self.timeout_s), self.permits:
                return await self.follow(read_url(url))
        except TimeoutError as error:
            text = f"could not be fetched within {self.timeout_s:g} s (PICTURE_FETCH_TIMEOUT_S)"
            raise PictureError(text) from error
        except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException, OSError) as error:
            raise PictureError(f"could not be fetched: {type(error).__name__}") from error

    async def follow(self, target: PictureUrl) -> bytes:
        """The bytes at a target, or where it redirects to. Each target is checked."""
        for _ in range(MAX_REDIRECTS + 1):
            check_allowed(target, self.domains)
            found = await self.get(target)
            if isinstance(found, bytes):
                return found
            target = found
        raise PictureError(f"could not be fetched: there were more than {MAX_REDIRECTS} redirects")

    async def get(self, target: PictureUrl) -> bytes | PictureUrl:
        """The bytes of a target, or the one that it redirects to."""
        headers = [("host", target.host_header), *HEADERS]
        async with (
            httpcore.AsyncConnectionPool(network_backend=self.backend, max_connections=1) as connections,
            connections.stream("GET", target.url, headers=headers) as response,
        ):
            known = {
                name.decode("latin-1").lower(): text.decode("latin-1") for name, text in response.headers
            }
            if response.status in REDIRECTS and "location" in known:
                own = f"{target.scheme}://{target.host_header}{target.path}"
                return read_url(urljoin(own, known["location"]))
            check_head(response.status, known)
            return await self.read(response, known.get("content-length", ""))

    async def read(self, response: httpcore.Response, announced: str) -> bytes:
        """The body, as far as it is no larger than a picture may be."""
        too_large = PictureError(f"has more than {self.max_bytes} bytes (MAX_PICTURE_BYTES)")
        if announced.isdecimal() and int(announced) > self.max_bytes:
            raise too_large
        content = bytearray()
        async for chunk in response.aiter_stream():
            content += chunk
            if len(content) > self.max_bytes:
                raise too_large
        return bytes(content)


def check_head(status: int, headers: Mapping[str, str]) -> None:
    """Raises PictureError for a response that is no picture."""
    if status != 200:
        raise PictureError(f"could not be fetched: the host answers with status {status}")
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise PictureError("could not be fetched: the host compresses it, though it was asked not to")
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if not kind.startswith(KINDS):
        raise PictureError(f"has the content type {kind[:80]!r}, which is none of a picture")
