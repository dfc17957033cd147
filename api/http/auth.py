"""Access to the routes that take a prompt or show the fleet.

If API_KEY is set, a request needs the header `Authorization: Bearer <key>`. Otherwise every client that
reaches the port has access, but no web page of another origin.
"""

import ipaddress
import re
import secrets
import socket
from collections.abc import Collection

from fastapi import Request

from api.errors import ApiError, quoted

LOCAL_ORIGINS = (
    r"https?://(localhost|127(\.\d+){3}|\[::1\]|0\.0\.0\.0)(:\d+)?"
    r"|(app|tauri|vscode-webview|vscode-file|[a-z]+-extension)://.+"
)
"""Origins of pages of this machine or of a program on it: no website has one. As in Ollama."""
LOCAL_NAME = re.compile(r"[^.]*|.+\.(localhost|local|internal)")
"""Names of hosts that nobody can register in the public DNS. As in Ollama."""


def sent_key(request: Request) -> tuple[str, bytes]:
    """The scheme in small letters, and the API key, of the header `Authorization`; empty without one."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return scheme.lower(), key.strip().encode("latin-1")


async def check_key(key: str, request: Request) -> None:
    """Raises ApiError (401) unless the client sent the key."""
    scheme, sent = sent_key(request)
    if not (scheme == "bearer" and secrets.compare_digest(sent, key.encode())):
        why = "Incorrect API key: expected the header `Authorization: Bearer <key>`"
        raise ApiError(401, "unauthorized", why)


async def check_page(allowed: Collection[str], request: Request) -> None:
    """Raises ApiError (403) for a request that a browser sends for a page of another origin, unless that
    origin is allowed.

    A browser hides the answer from such a page, but the request would act all the same. A page may also give
    its own name this machine's address (DNS rebinding); its browser then takes our origin for the page's. So
    over a loopback address the `Host` must be a name that cannot lead elsewhere.
    """
    if "*" in allowed:
        return
    host, origin = request.headers.get("host", "").lower(), request.headers.get("origin")
    if origin is not None and host_of(origin) != host and not is_allowed(origin, allowed):
        raise forbidden(f"pages of the origin {quoted(origin)}")
    if origin is None and request.headers.get("sec-fetch-site") == "cross-site":
        raise forbidden("pages of other sites")
    server, _ = request.scope.get("server") or ("", None)
    if is_loopback(server) and not is_local(host) and host not in map(host_of, allowed):
        raise forbidden(f"pages of the host {quoted(host)}, which is not known to be this machine,")


def forbidden(who: str) -> ApiError:
    why = f"{who} may not call here: while there is no API_KEY, CORS_ALLOW_ORIGIN names who else may"
    return ApiError(403, "forbidden", why[0].upper() + why[1:])


def host_of(origin: str) -> str:
    return origin.partition("://")[2].lower()


def is_allowed(origin: str, allowed: Collection[str]) -> bool:
    return origin in allowed if allowed else re.fullmatch(LOCAL_ORIGINS, origin) is not None


def is_local(host: str) -> bool:
    """Whether a `Host` header is an address, or a name that cannot be registered in the public DNS."""
    name = re.sub(r":\d*$", "", host).strip("[]")
    return is_address(name) or LOCAL_NAME.fullmatch(name) is not None or name == socket.gethostname().lower()


def is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    return ipaddress.ip_address(host).is_loopback if is_address(host) else host == "localhost"
