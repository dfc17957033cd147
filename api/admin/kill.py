"""The kill button of a demonstration: sends SIGKILL to a process of this fleet, and to no other process.

Only the person at this machine may use it: DEMO must be on, the page must have been loaded from a loopback
address, and the process must be, like this gateway, a child of the launcher.
"""

import asyncio
import contextlib
import os
import signal
import socket
from typing import Any
from urllib.parse import urlsplit

from starlette.requests import Request

from api.errors import ApiError, quoted
from api.http.auth import is_loopback

COMMAND_LINES = {
    "gateway": "tokenfleet api",
    "batcher": "tokenfleet batcher",
    "worker": "tokenfleet worker",
    "jobworker": "tokenfleet jobs",
    "broker": "valkey-server",
}
"""What the command line of a process contains, by its kind."""


def forbidden(cause: str) -> ApiError:
    return ApiError(403, "forbidden", f"Not killed: {cause}")


def check_same_origin(request: Request) -> None:
    """Raises ApiError (403) for pages of other origins, which can send this request, too."""
    host = request.headers.get("host", "")
    if not is_loopback(urlsplit(f"//{host}").hostname or ""):
        raise forbidden(f"the host {quoted(host)} is not a loopback address")
    origin = request.headers.get("origin")
    if origin is not None and origin != f"{request.url.scheme}://{host}":
        raise forbidden(f"the page's origin {quoted(origin)} is not ours")


async def check_own_process(process: dict[str, Any]) -> None:
    """Raises ApiError (403) unless the process is a child of our own launcher, on this machine."""
    if process["kind"] != "broker" and process["host"] != socket.gethostname():
        raise forbidden(f"it runs on {process['host'] or 'another machine'}")
    parent, user, title = await inspect_process(process["pid"])
    if parent != os.getppid() or user != os.getuid() or COMMAND_LINES[process["kind"]] not in title:
        raise forbidden(f"process {process['pid']} is not one of this fleet")


async def inspect_process(pid: int) -> tuple[int, int, str]:
    """Parent, user and command line of a process. Raises ApiError (404) if there is no such process."""
    command = ("ps", "-o", "ppid=,uid=,command=", "-p", str(pid))
    ps = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    stdout, _ = await ps.communicate()
    if not stdout.strip():
        raise ApiError(404, "not_found", f"There is no process {pid}")
    parent, user, title = stdout.decode(errors="replace").split(maxsplit=2)
    return int(parent), int(user), title


def send_sigkill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
