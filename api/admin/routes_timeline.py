"""GET /fleet/requests/{id}: one request's life, as the batcher told it."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from api.admin import timeline
from api.errors import Refusal, asking_broker, encode
from api.http.openapi import error_responses
from api.inference.pool import gateway_of
from api.tgi.response_schemas import ERROR_RESPONSES, ErrorResponse

router = APIRouter(responses={status: ERROR_RESPONSES[status] for status in (401, 503)})


@router.get(
    "/fleet/requests/{request_id:path}", responses=error_responses(ErrorResponse, {404: "No such request"})
)
async def request_timeline(request: Request, request_id: str) -> Response:
    """What happened to a request, and to each of its choices. 404 for one that was never heard of, or so long
    ago that it is forgotten.
    """
    gateway = gateway_of(request)
    async with asking_broker():
        timelines = await timeline.read_timelines(gateway.redis, gateway.fleet.keys, request_id)
    if not timelines:
        raise Refusal(
            404,
            "not_found",
            f"Nothing is known of a request {request_id}: it never came, or was forgotten since",
        )
    return Response(
        encode({"request_id": request_id, "timelines": timelines}),
        200,
        {"cache-control": "no-store"},
        "application/json",
    )
