"""GET /requests/{id}/stream: goes on with a streamed answer, for a client that comes back."""

import re

from fastapi import APIRouter, Request
from sse_starlette import EventSourceResponse
from starlette.responses import Response

from api.errors import invalid, quoted
from api.http.openapi import RESUME, ErrorResponses, RequestId, error_responses
from api.resume import attach
from api.resume.attach import find_own
from api.streams.http_response import TokenStream
from api.tgi.response_schemas import ERROR_RESPONSES, ErrorResponse

ORDINAL = re.compile(r"[0-9]{1,9}")
LAST_EVENT_ID = {
    "name": attach.HEADER,
    "in": "header",
    "description": "The `id` of the last frame that the client has. Default: it has none.",
    "schema": {"type": "string", "pattern": "^[0-9]{1,9}$"},
}
ERRORS: ErrorResponses = {status: ERROR_RESPONSES[status] for status in (401, 403, 422, 503)}
ERRORS |= error_responses(
    ErrorResponse,
    {
        404: "There is no such answer, or it belongs to another API key",
        410: "The answer was cancelled: nobody came back for it in time",
    },
)
router = APIRouter(
    responses=ERRORS,
    tags=[RESUME],
)


@router.get(
    "/requests/{request_id}/stream",
    summary="Go on with a streamed answer",
    openapi_extra={"parameters": [LAST_EVENT_ID]},
    responses={
        200: {"description": "The frames behind that one, as the route sends them that was asked"},
        204: {"description": "The client has all frames"},
    },
    response_class=EventSourceResponse,
)
async def resume_stream(request: Request, request_id: RequestId) -> Response:
    """Sends the frames behind `Last-Event-ID` as the first connection would have, at any gateway. The path is
    in the first response's header `content-location`. Another connection with the same answer ends. A POST
    with `Last-Event-ID`, and the request's id in `x-request-id`, does the same.
    """
    num_seen = read_last_event_id(request)
    admitted = await find_own(request, request_id)
    if admitted is None or not admitted.answer.streamed:
        raise attach.unknown_answer(request_id)
    pool, answer, channel = admitted
    streams, frames = await attach.read_behind(pool, answer, channel, num_seen)
    if frames is None:
        return Response(status_code=204)
    reader = await attach.become_reader(pool, streams)
    return TokenStream(
        answer,
        frames=frames,
        streams=streams,
        headers={},
        release=pool.admission.release,
        reader=reader,
        num_seen=num_seen,
    )


def read_last_event_id(request: Request) -> int:
    """Number of frames that the client has. Raises ApiError (422)."""
    given = request.headers.get(attach.HEADER, "0")
    if not ORDINAL.fullmatch(given):
        raise invalid(
            f"`{attach.HEADER}` must be the id of a frame, a number. Given: {quoted(given)}", attach.HEADER
        )
    return int(given)
