"""GET /fleet: the processes and their state. POST /fleet/processes/{id}/kill: kills one, with DEMO only."""

from importlib.metadata import version
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request
from starlette.background import BackgroundTask
from starlette.responses import Response

from api.admin import processes
from api.admin.health import describe_health
from api.admin.kill import check_own_process, check_same_origin, forbidden, send_sigkill
from api.errors import ApiError, asking_broker, cut
from api.http.openapi import FLEET, error_responses
from api.inference.pool import Pool
from api.inference.pool_registry import own_pool
from api.json import to_json
from api.tgi.response_schemas import ERROR_RESPONSES, ErrorResponse

KILL_ERRORS = error_responses(
    ErrorResponse,
    {403: "The client may not, or the process is not one of this fleet", 404: "No such process"},
)
router = APIRouter(responses={status: ERROR_RESPONSES[status] for status in (401, 403, 503)}, tags=[FLEET])
VERSION = version("tokenfleet")


@router.get("/fleet", summary="List processes")
async def fleet(request: Request) -> Response:
    """Returns every process of the pool with its state, how many requests wait and run, and `health`: its
    `state` is `bad` when requests are not served now, `warn` when less works than should, else `good`.
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
    return Response(to_json(content), 200, {"cache-control": "no-store"}, "application/json")


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
    # In the background, so that a gateway that kills itself has responded before.
    return Response(
        to_json({"killed": process_id}),
        202,
        media_type="application/json",
        background=BackgroundTask(send_sigkill, process["pid"]),
    )


async def read_process_list(pool: Pool) -> processes.ProcessList:
    """Raises ApiError (503) if the broker does not answer."""
    async with asking_broker():
        return await processes.list_processes(pool.client, pool.batcher)
