"""GET /fleet: the processes and their state. POST /fleet/processes/{id}/kill: kills one, for demonstrations.

Only the person at this machine may kill, and only processes of this fleet: DEMO must be on, the page must
have been loaded from a loopback address, and the process must be, like this gateway, a child of the launcher.
"""

import asyncio
import contextlib
import os
import signal
import socket
from importlib.metadata import version
from typing import Annotated, Any
from urllib.parse import urlsplit

from fastapi import APIRouter, Path, Request
from starlette.background import BackgroundTask
from starlette.responses import Response

from api.admin.adapter_changes import describe_adapter
from api.admin.processes import ProcessList, describe_health, list_models, list_processes
from api.errors import ApiError, asking_broker, cut, quoted
from api.http.auth import is_loopback
from api.http.openapi import FLEET, error_responses, only
from api.json import fresh_json, to_json
from api.requests.on_pool import own_pool
from api.requests.pool import Pool
from api.tgi.response_schemas import ERROR_RESPONSES, ErrorResponse

COMMAND_LINES = {
    "gateway": "tokenfleet api",
    "batcher": "tokenfleet batcher",
    "worker": "tokenfleet worker",
    "jobworker": "tokenfleet jobworker",
    "broker": "valkey-server",
}
"""Kinds of processes → what their command lines contain."""
KILL_ERRORS = error_responses(
    ErrorResponse,
    {403: "The client may not, or the process is not one of this fleet", 404: "No such process"},
)
router = APIRouter(responses=only(ERROR_RESPONSES, 401, 403, 503), tags=[FLEET])
VERSION = version("tokenfleet")


@router.get("/fleet", summary="List processes")
async def fleet(request: Request) -> Response:
    """Returns every process of the pool with its state, how many requests wait and run, and `health`. Its
    `state` is `bad` if requests are not served now, `warn` if processes are missing, else `good`. Where there
    are LoRA adapters, `adapters` has those of `GET /admin/adapters`.
    """
    pool = own_pool(request)
    listed = await read_process_list(pool)
    settings = pool.settings
    content = {
        "pool": settings.pool,
        "model": settings.model_name,
        "version": VERSION,
        "time_s": listed.time_s,
        "demo": settings.demo,
        "health": await describe_health(pool, listed),
        "requests": listed.requests | {"limit": settings.max_concurrent_requests},
        "processes": listed.processes,
    }
    if adapters := pool.adapters.registry.adapters.values():
        content["adapters"] = [describe_adapter(pool.workers, one).model_dump() for one in adapters]
    if settings.models:
        async with asking_broker():
            content["models"] = await list_models(pool.client, settings.pools)
    return fresh_json(content)


@router.post(
    "/fleet/processes/{process_id}/kill",
    summary="Kill a process (demonstration)",
    status_code=202,
    responses=KILL_ERRORS,
)
async def kill_process(
    request: Request, process_id: Annotated[str, Path(description="One that `GET /fleet` lists.")]
) -> Response:
    """Sends SIGKILL to a process of this fleet. Needs the setting DEMO, and a request from this machine."""
    pool = own_pool(request)
    if not pool.settings.demo:
        raise forbidden("DEMO is not on")
    check_same_origin(request)
    process: dict[str, Any] | None = (await read_process_list(pool)).find(process_id)
    if process is None:
        raise ApiError(404, "not_found", f"There is no process {cut(process_id)} in this fleet")
    await check_own_process(process)
    # After the response: a gateway may kill itself.
    return Response(
        to_json({"killed": process_id}),
        202,
        media_type="application/json",
        background=BackgroundTask(send_sigkill, process["pid"]),
    )


async def read_process_list(pool: Pool) -> ProcessList:
    """Raises ApiError (503) if the broker does not answer."""
    async with asking_broker():
        return await list_processes(pool.client, pool.batcher)


# --- kill ---------------------------------------------------------------------------------------------------


def forbidden(cause: str) -> ApiError:
    return ApiError(403, "forbidden", f"Not killed: {cause}")


def check_same_origin(request: Request) -> None:
    """Raises ApiError (403) for pages of other origins: they can send this request, too."""
    host = request.headers.get("host", "")
    if not is_loopback(urlsplit(f"//{host}").hostname or ""):
        raise forbidden(f"the host {quoted(host)} is not a loopback address")
    origin = request.headers.get("origin")
    if origin is not None and origin != f"{request.url.scheme}://{host}":
        raise forbidden(f"the page's origin {quoted(origin)} is not ours")


async def check_own_process(process: dict[str, Any]) -> None:
    """Raises ApiError (403) unless the process is a child of this gateway's launcher, on this machine."""
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
