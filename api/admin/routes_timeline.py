"""GET /fleet/requests/{id}: the timeline of one request, as the batcher wrote it."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from api.admin import timeline
from api.errors import ApiError, asking_broker, cut
from api.http.openapi import FLEET, RequestId, error_responses
from api.inference.pool_registry import own_pool
from api.json import to_json
from api.tgi.response_schemas import ERROR_RESPONSES, ErrorResponse

router = APIRouter(responses={status: ERROR_RESPONSES[status] for status in (401, 403, 503)}, tags=[FLEET])


@router.get(
    "/fleet/requests/{request_id:path}",
    summary="Show a request's timeline",
    responses=error_responses(ErrorResponse, {404: "No such request"}),
)
async def request_timeline(request: Request, request_id: RequestId) -> Response:
    """Returns the events of a request and of each of its choices: queued, placed on a worker, first token,
    resumed, ended. Timelines are kept for a day at most; then the response is 404.
    """
    pool = own_pool(request)
    async with asking_broker():
        timelines = await timeline.read_timelines(pool.client, request_id)
    if not timelines:
        raise ApiError(
            404,
            "not_found",
            f"There is no timeline of a request {cut(request_id)}: it was never queued, or it has expired",
        )
    return Response(
        to_json({"request_id": request_id, "timelines": timelines}),
        200,
        {"cache-control": "no-store"},
        "application/json",
    )
