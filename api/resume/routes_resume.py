"""GET /requests/{id}/stream: goes on with a streamed answer, for a client that comes back. A POST with
`Last-Event-ID` is sent there, too.
"""

import re

from fastapi import APIRouter, Request
from sse_starlette import EventSourceResponse
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from api.errors import invalid, quoted
from api.http.middleware import STREAM_PATH, error_response
from api.http.openapi import (
    RESUME,
    TGI_ERRORS,
    ErrorResponse,
    RequestId,
    Responses,
    error_responses,
    only,
)
from api.protocols.protocol import errors_of, row_of
from api.requests.service_terms import REQUEST_ID_HEADER
from api.resume import attach, rest
from api.resume.attach import find_own
from api.resume.rest import LAST_EVENT_ID

ORDINAL = re.compile(r"[0-9]{1,9}")
LAST_EVENT_ID_PARAMETER = {
    "name": LAST_EVENT_ID,
    "in": "header",
    "description": "The `id` of the last frame that the client has. Default: it has none.",
    "schema": {"type": "string", "pattern": "^[0-9]{1,9}$"},
}
ERRORS: Responses = only(TGI_ERRORS, 401, 403, 422, 503)
ERRORS |= error_responses(
    ErrorResponse,
    {
        404: "There is no such answer, or it belongs to another API key",
        410: "The answer was cancelled: nobody came back for it in time",
    },
)
router = APIRouter(responses=ERRORS, tags=[RESUME])


@router.get(
    STREAM_PATH,
    summary="Go on with a streamed answer",
    openapi_extra={"parameters": [LAST_EVENT_ID_PARAMETER]},
    responses={
        200: {"description": "The frames after that one, as the first route sends them"},
        204: {"description": "The client has all frames"},
    },
    response_class=EventSourceResponse,
)
async def resume_stream(request: Request, request_id: RequestId) -> Response:
    """Sends the frames after `Last-Event-ID`, at any gateway, as the first connection would have sent them.
    The path is in the header `content-location` of the first response. Another connection with the same
    answer ends. A POST with `Last-Event-ID`, and the request's id in `x-request-id`, does the same.
    """
    num_seen = read_last_event_id(request)
    admitted = await find_own(request, request_id)
    if admitted is None or not admitted.answer.streamed:
        raise attach.unknown_answer(request_id)
    found = await rest.read_rest(*admitted, num_seen)
    return await found.respond() if found else Response(status_code=204)


def read_last_event_id(request: Request) -> int:
    """Number of frames that the client has. Raises ApiError (422)."""
    given = request.headers.get(LAST_EVENT_ID, "0")
    if not ORDINAL.fullmatch(given):
        raise invalid(
            f"`{LAST_EVENT_ID}` must be the id of a frame, a number. Given: {quoted(given)}", LAST_EVENT_ID
        )
    return int(given)


async def resume_posts(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """Middleware: a POST with `Last-Event-ID` becomes `GET /requests/{x-request-id}/stream`. Its body, which
    repeats the earlier one, is not read.
    """
    row = row_of(scope) if scope.get("method") == "POST" else None
    headers = Headers(scope=scope) if row is not None and row.resumable else Headers()
    if LAST_EVENT_ID not in headers:
        await app(scope, receive, send)
    elif REQUEST_ID_HEADER not in headers:
        text = f"`{LAST_EVENT_ID}` needs the request's id in `{REQUEST_ID_HEADER}`: see `content-location`"
        await error_response(invalid(text, LAST_EVENT_ID), errors_of(scope))(scope, receive, send)
    else:
        path = STREAM_PATH.format(request_id=headers[REQUEST_ID_HEADER])
        scope.update(method="GET", path=path, raw_path=path.encode())
        await app(scope, receive, send)
