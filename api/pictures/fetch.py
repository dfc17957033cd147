"""Fetch: gets a picture from a public host that a setting allows."""

import asyncio
from collections.abc import Iterable, Mapping
from urllib.parse import urljoin

import httpcore

from api.outbound.addresses import (
    DEFAULT_PORTS,
    TargetUrl,
    UrlError,
    is_address,
    is_allowed,
    read_url,
)
from api.outbound.public_hosts import PublicHosts
from common.pictures import PictureError

SETTING = "ALLOWED_MEDIA_DOMAINS"
SCHEMES = ("https:", "http:")
MAX_REDIRECTS = 3
MAX_CONNECTIONS = 16
"""Of one gateway; further pictures wait."""
REDIRECTS = (301, 302, 303, 307, 308)
KINDS = ("image/", "application/octet-stream", "binary/octet-stream")
"""How content types of pictures begin; stores of objects often know no better."""
HEADERS = [("accept", "image/*"), ("accept-encoding", "identity"), ("user-agent", "tokenfleet")]


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
        if not url.lower().startswith(SCHEMES):
            raise PictureError("must be a URL that begins with data:, https: or http:")
        try:
            async with asyncio.timeout(self.timeout_s), self.permits:
                return await self.follow(read_url(url))
        except UrlError as error:
            raise PictureError(str(error)) from error
        except TimeoutError as error:
            text = f"could not be fetched within {self.timeout_s:g} s"
            raise PictureError(text) from error
        except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException, OSError) as error:
            raise PictureError(f"could not be fetched: {type(error).__name__}") from error

    async def follow(self, target: TargetUrl) -> bytes:
        """The bytes at a target, or where it redirects to. Each target is checked."""
        for _ in range(MAX_REDIRECTS + 1):
            check_allowed(target, self.domains)
            found = await self.get(target)
            if isinstance(found, bytes):
                return found
            target = found
        raise PictureError(f"could not be fetched: there were more than {MAX_REDIRECTS} redirects")

    async def get(self, target: TargetUrl) -> bytes | TargetUrl:
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


def check_allowed(target: TargetUrl, domains: Iterable[str]) -> None:
    """Raises PictureError if the setting does not allow a host and its port."""
    if not any(is_allowed(target, domain) for domain in domains):
        where = target.host_header if target.port != DEFAULT_PORTS[target.scheme] else target.host
        raise PictureError(f"is at {where}, from which nothing is fetched here ({SETTING})")


def check_head(status: int, headers: Mapping[str, str]) -> None:
    """Raises PictureError for a response that is no picture."""
    if status != 200:
        raise PictureError(f"could not be fetched: the host answers with status {status}")
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise PictureError("could not be fetched: the host compresses it, though it was asked not to")
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if not kind.startswith(KINDS):
        raise PictureError(f"has the content type {kind[:80]!r}, which is none of a picture")
