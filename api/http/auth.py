"""Access to the routes that take a prompt or show the fleet, and the keys that count.

If API_KEY is set, or there are other API keys, a request needs the header `Authorization: Bearer <key>`,
or `x-api-key: <key>`. Otherwise every client that reaches the port has access, but no web page of another
origin. Once there are other keys, routes that show or change the fleet need the key of an admin; API_KEY is
one.
"""

import asyncio
import hmac
import ipaddress
import logging
import re
import socket
from collections.abc import Callable, Collection, Iterable

from fastapi import Request

from api.errors import ApiError, quoted, unavailable
from api.outbound import is_address
from api.requests.monitors import Monitor
from common.api_keys import STATIC_KEY_ID, ApiKey, digest_of, read_keys
from common.broker.pool_client import BrokerClock, PoolClient
from common.settings.settings import Settings

API_KEY = "api_key"
"""Key of a request's state: the record of its API key."""

LOCAL_ORIGINS = (
    r"https?://(localhost|127(\.\d+){3}|\[::1\]|0\.0\.0\.0)(:\d+)?"
    r"|(app|tauri|vscode-webview|vscode-file|[a-z]+-extension)://.+"
)
"""Origins of pages of this machine or of a program on it: no website has one. As in Ollama."""
LOCAL_NAME = re.compile(r"[^.]*|.+\.(localhost|local|internal)")
"""Names of hosts that nobody can register in the public DNS. As in Ollama."""


def sent_key(request: Request) -> tuple[str, bytes]:
    """The scheme in small letters, and the API key, of the header `Authorization`; without it those of
    `x-api-key`, as Anthropic's clients send it; empty without both.
    """
    if (given := request.headers.get("authorization")) is None:
        key = request.headers.get("x-api-key", "")
        return ("bearer" if key else ""), key.strip().encode("latin-1")
    scheme, _, key = given.partition(" ")
    return scheme.lower(), key.strip().encode("latin-1")


async def check_key(request: Request) -> None:
    """Check who asks, and note the record of the key. Raises ApiError: 401, 403; 503 while it is not known
    whether there are keys. Without keys no page of another origin may ask but of those in CORS_ALLOW_ORIGIN.
    """
    keys: KeyRing = request.app.state.keys
    if keys.is_open:
        check_page(request.app.state.settings.cors_allow_origin, request)
        return
    scheme, sent = sent_key(request)
    if scheme != "bearer":
        raise unauthorized(f"Incorrect API key: {EXPECTED}")
    key = keys.find(sent)
    if keys.has_keys:
        request.scope["state"][API_KEY] = key


async def check_admin(request: Request) -> None:
    """After `check_key`, check who shows or changes the fleet. Raises ApiError (403)."""
    key = key_of(request)
    if key and not key.admin:
        raise ApiError(403, "forbidden", f"This route needs an admin's key, which {key.key_id} is not")


def key_of(request: Request) -> ApiKey | None:
    """The record of the key that a request was sent with; None where there is no key, or API_KEY alone."""
    key: ApiKey | None = request.scope["state"].get(API_KEY)
    return key


def check_page(allowed: Collection[str], request: Request) -> None:
    """Raises ApiError (403) for a request that a browser sends for a page of another origin, unless that
    origin is allowed.

    A browser hides the answer from such a page, but the request would act all the same. A page may also give
    its own name this machine's address (DNS rebinding); its browser then takes our origin for the page's. So
    over a loopback address the `Host` must be a name that cannot lead elsewhere.
    """
    if "*" in allowed:
        return
    host, origin = request.headers.get("host", "").lower(), request.headers.get("origin")
    if (
        origin is not None
        and host_of(origin) != host
        and not (origin in allowed if allowed else re.fullmatch(LOCAL_ORIGINS, origin))
    ):
        raise forbidden(f"pages of the origin {quoted(origin)}")
    if origin is None and request.headers.get("sec-fetch-site") == "cross-site":
        raise forbidden("pages of other sites")
    server, _ = request.scope.get("server") or ("", None)
    if is_loopback(server) and host not in map(host_of, allowed):
        # an address, or a name that cannot be registered in the public DNS
        name = re.sub(r":\d*$", "", host).strip("[]")
        if not (is_address(name) or LOCAL_NAME.fullmatch(name) or name == socket.gethostname().lower()):
            raise forbidden(f"pages of the host {quoted(host)}, which is not known to be this machine,")


def forbidden(who: str) -> ApiError:
    why = f"{who} may not call here: while there is no API_KEY, CORS_ALLOW_ORIGIN names who else may"
    return ApiError(403, "forbidden", why[0].upper() + why[1:])


def host_of(origin: str) -> str:
    return origin.partition("://")[2].lower()


def is_loopback(host: str) -> bool:
    return ipaddress.ip_address(host).is_loopback if is_address(host) else host == "localhost"


# --- key ring -----------------------------------------------------------------------------------------------


log = logging.getLogger(__name__)

POLL_S = 1.0
"""How often keys are looked at: one that is revoked counts nowhere after this time and a round trip."""
EXPECTED = "expected the header `Authorization: Bearer <key>` or `x-api-key: <key>`"


class KeyRing(Monitor):
    """The keys of one gateway, whatever its pools.

    Attributes:
        static: the record of API_KEY, None without it.
        was_read: set when the keys are known.
        has_keys: whether there is or was a key besides API_KEY: from then on a request needs one, also if
            the broker loses them all.
        seen: the version of the keys that were read last; None before the first time.
        active: ids of keys that count, and so all that may have live requests.
        client: reads them, and knows the time of the broker.
        on_lost: takes the ids of keys that count no more.
    """

    def __init__(self, settings: Settings, on_lost: Callable[[Collection[str]], None]) -> None:
        super().__init__(POLL_S, "the API keys")
        self.client: PoolClient | None = None
        self.on_lost = on_lost
        self.static = (
            ApiKey(STATIC_KEY_ID, digest_of(settings.api_key), admin=True) if settings.api_key else None
        )
        self.by_digest: dict[str, ApiKey] = {}
        self.by_id: dict[str, ApiKey] = {}
        self.clock = BrokerClock()
        self.active: set[str] = set()
        self.seen: bytes | None = None
        self.was_read = asyncio.Event()
        self.has_keys = False

    # --- keys -----------------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether requests need no key. Raises ApiError (503) while that is not known."""
        if self.static or self.has_keys:
            return False
        if not self.was_read.is_set():
            raise unavailable("the API keys could not be read yet")
        return True

    def find(self, sent: bytes) -> ApiKey:
        """The record of the key that a client sent. Raises ApiError: 401; 503 while keys are not known."""
        digest = digest_of(sent)
        for known in (self.static, self.by_digest.get(digest)):
            if known is not None and hmac.compare_digest(known.digest, digest):
                return self.check(known)
        if not self.was_read.is_set():
            raise unavailable("the API keys could not be read yet")
        raise unauthorized(f"Incorrect API key: {EXPECTED}")

    def named(self, key_id: str) -> ApiKey:
        """The key with this id. Raises ApiError (401) if it counts no more."""
        if self.static and key_id == STATIC_KEY_ID:
            return self.static
        if (key := self.by_id.get(key_id)) is None:
            raise unauthorized(f"The API key {key_id} was deleted")
        return self.check(key)

    def check(self, key: ApiKey) -> ApiKey:
        """Raises ApiError (401)."""
        match key.state(self.clock.now_s()):
            case "revoked":
                raise unauthorized(f"The API key {key.key_id} was revoked")
            case "expired":
                raise unauthorized(f"The API key {key.key_id} has expired")
        self.active.add(key.key_id)
        return key

    # --- changes --------------------------------------------------------------------------------------------

    def take(self, keys: Iterable[ApiKey]) -> None:
        """Have these keys count, and no others."""
        self.by_id = {key.key_id: key for key in keys}
        self.by_digest = {key.digest: key for key in self.by_id.values()}
        self.has_keys = self.has_keys or bool(self.by_id)

    def take_time(self) -> set[str]:
        """Find which keys count now. Returns the ids of those that did and do no more."""
        now_s, before = self.clock.now_s(), self.active
        known = [*self.by_id.values(), *([self.static] if self.static else [])]
        self.active = {key.key_id for key in known if key.state(now_s) == "active"}
        return before - self.active

    async def read(self) -> None:
        """Read the keys if they have changed."""
        assert self.client is not None
        if (version := await self.client.read_version(self.client.keys.api_keys)) != self.seen:
            self.take((await read_keys(self.client)).values())
            self.seen = version
        self.was_read.set()
        if lost := self.take_time():
            log.info("API keys that count no more: %s", ", ".join(sorted(lost)))
            self.on_lost(lost)


def unauthorized(why: str) -> ApiError:
    return ApiError(401, "unauthorized", why)
