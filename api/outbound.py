"""Addresses that a gateway connects to because a client has named a URL: of a picture, or of a webhook.
Whoever writes a URL must reach nothing through the gateway that is not public: no service of this machine, of
its network or of its cloud.
"""

import asyncio
import ipaddress
import re
import socket
import ssl
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from typing import Any
from urllib.parse import urlsplit

import httpcore

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
DEFAULT_PORTS = {"http": 80, "https": 443}
HOST = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?")
NAT64 = ipaddress.ip_network("64:ff9b::/96")
"""IPv6 addresses that end with an IPv4 address."""
PROTOCOLS = ipaddress.ip_network("192.0.0.0/24")
"""Addresses of protocols, which Python takes for global in part."""

LOOK_UPS = ThreadPoolExecutor(32, "look-up")
"""Threads that ask for addresses. A name that a client chooses may take as long as its servers like: it holds
up neither files nor connections to the broker.
"""


class UrlError(ValueError):
    """Nothing is sent to a URL; the text says why, as the end of a sentence about it."""


@dataclass(frozen=True, slots=True)
class TargetUrl:
    """What a URL names; the only reading of it, so that nothing is checked that is not connected to."""

    scheme: str
    host: str
    port: int
    path: str

    @property
    def url(self) -> httpcore.URL:
        return httpcore.URL(scheme=self.scheme, host=self.host, port=self.port, target=self.path)

    @property
    def host_header(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == DEFAULT_PORTS[self.scheme] else f"{host}:{self.port}"


def read_url(url: str) -> TargetUrl:
    """Read a URL of http: or https:. Raises UrlError."""
    try:
        parts = urlsplit(url)
        port = parts.port
        host = (parts.hostname or "").encode("idna").decode().rstrip(".")
    except ValueError as error:
        raise UrlError("is no URL") from error
    if parts.scheme not in DEFAULT_PORTS:
        raise UrlError("must be a URL that begins with https: or http:")
    if parts.username is not None or parts.password is not None:
        raise UrlError("must be a URL without a user and a password")
    if not (HOST.fullmatch(host) or is_address(host)):
        raise UrlError("is a URL without a usable host")
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    if not path.isascii() or not path.isprintable() or " " in path:
        raise UrlError("is a URL with characters that must be written with %")
    return TargetUrl(parts.scheme, host, port or DEFAULT_PORTS[parts.scheme], path)


def is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_allowed(target: TargetUrl, domain: str) -> bool:
    """Whether an entry of a setting allows a target: a host, `*.` and the end of hosts, or `*`; other ports
    than the usual ones follow a colon.
    """
    host, colon, port = domain.lower().rpartition(":")
    if not colon or not port.isdecimal() or (host.count(":") and not host.endswith("]")):
        host, port = domain.lower(), ""
    if target.port != (int(port) if port else DEFAULT_PORTS[target.scheme]):
        return False
    host = host.strip("[]")
    if host.startswith("*."):
        return target.host.endswith(host[1:]) and not is_address(target.host)
    return host in ("*", target.host)


def is_public(address: Address) -> bool:
    """Whether an address is one of the public internet. An IPv6 address that stands for an IPv4 address is
    that one; those of tunnels are not public.
    """
    if isinstance(address, ipaddress.IPv6Address):
        if address in NAT64:
            return is_public(ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF))
        if address.ipv4_mapped:
            return is_public(address.ipv4_mapped)
        if address.sixtofour or address.teredo or address.is_site_local:
            return False
    is_special = address.is_multicast or address.is_reserved or address in PROTOCOLS
    return address.is_global and not is_special


def check_literal(host: str) -> None:
    """Raises UrlError for what is known not to be public without a look-up: such an address, in any spelling,
    or `localhost`.
    """
    try:
        text = host if ":" in host else socket.inet_ntoa(socket.inet_aton(host))  # also 127.1, 0x7f000001
        address = ipaddress.ip_address(text)
    except (ValueError, OSError):
        address = None
    if host == "localhost" or host.endswith(".localhost") or (address and not is_public(address)):
        raise not_public(host)


def check_target(target: TargetUrl, allowed_hosts: Iterable[str]) -> bool:
    """Whether WEBHOOK_ALLOWED_HOSTS names the host of a webhook. Raises UrlError for http: and for an address
    that is not public, unless it does.
    """
    if any(is_allowed(target, host) for host in allowed_hosts):
        return True
    if target.scheme != "https":
        raise UrlError("must begin with https:, as its host is not in WEBHOOK_ALLOWED_HOSTS")
    check_literal(target.host)
    return False


def not_public(host: str) -> UrlError:
    return UrlError(f"is at {host}, which is no host of the public internet")


async def public_addresses(host: str, port: int, named: Iterable[str]) -> list[str]:
    """The addresses of a host. Raises UrlError if it has none, or one that is not public; `named` ones
    are in a setting themselves, and need not be.
    """
    try:
        look_up = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
        found = await asyncio.get_running_loop().run_in_executor(LOOK_UPS, look_up)
    except OSError as error:
        raise UrlError(f"is at {host}, whose address is not known") from error
    addresses = list(dict.fromkeys(str(info[4][0]) for info in found))
    for text in addresses:
        if host not in named and not is_public(ipaddress.ip_address(text.partition("%")[0])):
            raise not_public(host)
    if not addresses:
        raise UrlError(f"is at {host}, whose address is not known")
    return addresses


# --- public hosts -------------------------------------------------------------------------------------------


class PublicHosts(httpcore.AsyncNetworkBackend):
    """Connects to public addresses only, and to hosts that a setting itself names."""

    def __init__(self, named: Iterable[str]) -> None:
        self.named = frozenset(named)
        self.backend = httpcore.AnyIOBackend()

    def connections(self) -> httpcore.AsyncConnectionPool:
        """For one request."""
        return httpcore.AsyncConnectionPool(tls_context(), max_connections=1, network_backend=self)

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


@cache
def tls_context() -> ssl.SSLContext:
    """Reading the certificates takes some 20 ms."""
    return httpcore.default_ssl_context()
