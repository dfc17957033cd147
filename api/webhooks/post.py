"""Post: sends an event to its receiver. Where a name leads is checked when the connection is made, and no
redirect is followed: a receiver cannot send the gateway to a service of its own network.
"""

import asyncio
import ssl
from collections.abc import Iterable, Mapping
from functools import cache
from typing import NamedTuple

import httpcore

from api.outbound.addresses import TargetUrl, UrlError, check_literal, is_allowed, read_url
from api.outbound.public_hosts import PublicHosts

TIMEOUT_S = 10.0
GONE = 410
"""The status of a receiver that wants no more of these events."""
HEADERS = {"content-type": "application/json", "user-agent": "tokenfleet", "connection": "close"}


class Attempt(NamedTuple):
    """What became of an attempt.

    Attributes:
        said: what the receiver answered, or why it did not.
        is_gone: the receiver wants none of these events.
    """

    is_delivered: bool
    said: str
    is_gone: bool = False


def check_target(target: TargetUrl, allowed_hosts: Iterable[str]) -> None:
    """Raises UrlError for http: and for an address that is not public, unless WEBHOOK_ALLOWED_HOSTS names the
    host.
    """
    if is_named(target, allowed_hosts):
        return
    if target.scheme != "https":
        raise UrlError("must begin with https:, as its host is not in WEBHOOK_ALLOWED_HOSTS")
    check_literal(target.host)


def is_named(target: TargetUrl, allowed_hosts: Iterable[str]) -> bool:
    return any(is_allowed(target, host) for host in allowed_hosts)


@cache
def tls_context() -> ssl.SSLContext:
    """Reading the certificates takes some 20 ms."""
    return httpcore.default_ssl_context()


async def post(url: str, headers: Mapping[str, str], payload: bytes, allowed_hosts: Iterable[str]) -> Attempt:
    """Send an event once; it is delivered with a status of 2xx. Whatever fails is in what it returns."""
    try:
        target = read_url(url)
        check_target(target, allowed_hosts)
        named = [target.host] if is_named(target, allowed_hosts) else []
        async with asyncio.timeout(TIMEOUT_S):
            status = await send(target, PublicHosts(named), headers, payload)
    except UrlError as error:
        return Attempt(False, f"the URL {error}")
    except TimeoutError:
        return Attempt(False, f"no answer within {TIMEOUT_S:g} s")
    except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException, OSError) as error:
        return Attempt(False, f"no answer: {type(error).__name__}")
    return Attempt(200 <= status < 300, f"status {status}", status == GONE)


async def send(target: TargetUrl, backend: PublicHosts, headers: Mapping[str, str], payload: bytes) -> int:
    """The status with which the receiver answers; its body is not read."""
    whole = {"host": target.host_header, **HEADERS, **headers, "content-length": str(len(payload))}
    async with (
        httpcore.AsyncConnectionPool(
            ssl_context=tls_context(), network_backend=backend, max_connections=1
        ) as connections,
        connections.stream("POST", target.url, headers=list(whole.items()), content=payload) as response,
    ):
        return response.status
