"""GET /fleet/requests/{id}: one request's life, as the batcher told it."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from api.admin import timeline
from api.errors import Refusal, asking_broker, encode
from api.http.openapi import refusals
from api.inference.pool import gateway_of
from api.tgi.response_schemas import ALL, ErrorResponse

router = APIRouter(responses={status: ALL[status] for status in (401, 503)})


@router.get("/fleet/requests/{request_id:path}", responses=refusals(ErrorResponse, {404: "No such request"}))
async def explain(request: Request, request_id: str) -> Response:
    """What happened to a request, and to each of its choices. 404 for one that was never heard of, or so long
    ago that it is forgotten.
    """
    gateway = gateway_of(request)
    async with asking_broker():
        lives = await timeline.read(gateway.redis, gateway.fleet.keys, request_id)
    if not lives:
        raise Refusal(
            404,
            "not_found",
            f"Nothing is known of a request {request_id}: it never came, or was forgotten since",
        )
    return Response(
        encode({"request_id": request_id, "lives": lives}),
        200,
        {"cache-control": "no-store"},
        "application/json",
    )
