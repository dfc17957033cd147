"""Access to the routes that take a prompt or show the fleet.

If API_KEY is set, or there are other API keys, a request needs the header `Authorization: Bearer <key>`,
or `x-api-key: <key>`. Otherwise every client that reaches the port has access, but no web page of another
origin. Once there are other keys, routes that show or change the fleet need the key of an admin; API_KEY is
one.
"""

import ipaddress
import re
import socket
from collections.abc import Collection

from fastapi import Request

from api.errors import ApiError, quoted
from api.http.key_ring import EXPECTED, KeyRing, unauthorized
from api.outbound import is_address
from common.api_keys import ApiKey

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
