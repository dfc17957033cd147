"""Routes of an answer whose client comes back, or wants it no more: GET /requests/{id}/stream, which a POST
with `Last-Event-ID` becomes, too; POST /requests/streams; DELETE /requests/{id}.
"""

import re
from typing import Annotated

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field
from sse_starlette import EventSourceResponse
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from api.errors import ApiError, asking_broker, cut, invalid, quoted
from api.http import body
from api.http.error_handlers import error_response
from api.http.middleware import REQUEST_ID_HEADER
from api.http.openapi import (
    RESUME,
    TGI_ERRORS,
    ErrorResponse,
    RequestId,
    Responses,
    error_responses,
    json_body,
    only,
)
from api.json import json_response
from api.protocols.protocol import errors_of, row_of
from api.requests import request_scripts
from api.requests.on_pool import own_pool
from api.resume import attach, rest
from api.resume.rest import LAST_EVENT_ID, Rest
from common.ids import FRAME_ID

ORDINAL = re.compile(r"[0-9]{1,9}")
LAST_EVENT_ID_PARAMETER = {
    "name": LAST_EVENT_ID,
    "in": "header",
    "description": "The `id` of the last frame that the client has. Default: it has none.",
    "schema": {"type": "string", "pattern": "^[0-9]{1,9}$"},
}
MAX_STREAMS = 64
DescribedPlace = Annotated[str, Field(json_schema_extra={"pattern": f"^{FRAME_ID.pattern}$"})]
EXAMPLE = {"streams": ["5f0f8c0e4d7b4c6f9a3e2b1d0c9f8e7a", "0c9f8e7a5f0f8c0e4d7b4c6f9a3e2b1d/7"]}
NO_ANSWER = "There is no such answer, or it belongs to another API key"
NOBODY_CAME = "An answer was cancelled: nobody came back for it in time"
ERRORS: Responses = only(TGI_ERRORS, 401, 403, 503) | error_responses(ErrorResponse, {404: NO_ANSWER})
GONE = error_responses(ErrorResponse, {410: NOBODY_CAME})
router = APIRouter(responses=ERRORS, tags=[RESUME])


@router.get(
    "/requests/{request_id}/stream",
    summary="Go on with a streamed answer",
    openapi_extra={"parameters": [LAST_EVENT_ID_PARAMETER]},
    responses=only(TGI_ERRORS, 422)
    | GONE
    | {
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
    given = request.headers.get(LAST_EVENT_ID, "0")
    if not ORDINAL.fullmatch(given):
        why = f"`{LAST_EVENT_ID}` must be the id of a frame, a number. Given: {quoted(given)}"
        raise invalid(why, LAST_EVENT_ID)
    found = await rest.read_rest(*await attach.find_streamed(request, request_id), int(given))
    return await found.respond() if found else Response(status_code=204)


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
        path = f"/requests/{headers[REQUEST_ID_HEADER]}/stream"
        scope.update(method="GET", path=path, raw_path=path.encode())
        await app(scope, receive, send)


@router.delete("/requests/{request_id}", summary="Cancel a request")
async def cancel_request(request: Request, request_id: RequestId) -> Response:
    """Cancels all choices of a request, whatever connection reads its answer: a stream ends with an error.
    `cancelled` is false where it has ended already.
    """
    if (own := await attach.find_own(request, request_id)) is None:
        why = "it is not yours, its id is wrong, or it was answered"
        raise ApiError(404, "not_found", f"There is no request {cut(request_id)}: {why}")
    async with asking_broker():
        outcomes = [
            await request_scripts.cancel_request(own.pool.client, choice.request_id)
            for choice in own.answer.choices()
        ]
    return json_response({"id": request_id, "cancelled": any(outcomes)})


# --- several streams ----------------------------------------------------------------------------------------


class StreamPlaces(BaseModel):
    streams: Annotated[list[DescribedPlace], Field(min_length=1, max_length=MAX_STREAMS)] = Field(
        description="Ids of streamed answers that were requested with `resume_s` or `detached`. After a "
        "slash each may have the number of the last frame that the client has."
    )


@router.post(
    "/requests/streams",
    summary="Go on with several streamed answers",
    openapi_extra=json_body(StreamPlaces, EXAMPLE),
    responses=only(TGI_ERRORS, 400, 413, 415, 422, 424)
    | GONE
    | {
        200: {"description": "The frames after these of all answers, as they come"},
        204: {"description": "The client has all frames"},
    },
    response_class=EventSourceResponse,
)
async def read_streams(request: Request) -> Response:
    """Sends the frames of all these answers on one connection, each as soon as it is there: a browser opens
    six connections to a server over HTTP/1.1. The id of a frame is `{answer}/{number}`: the last one of each
    answer says where it goes on after a lost connection.
    """
    asked = await body.read(request, StreamPlaces, own_pool(request).settings.payload_limit)
    places = [read_place(place) for place in asked.streams]
    if len({answer_id for answer_id, _ in places}) < len(places):
        raise invalid("`streams` names an answer twice", "streams")
    found = [await read_rest(request, *place) for place in places]
    rests = [one for one in found if one is not None]
    return await rest.respond_with_rests(rests) if rests else Response(status_code=204)


def read_place(place: str) -> tuple[str, int]:
    """The answer's id, and the number of frames that the client has. Raises ApiError (422)."""
    if (parts := FRAME_ID.fullmatch(place)) is None:
        why = "`streams` must have ids of answers, or ids of frames (`{answer}/{number}`)"
        raise invalid(f"{why}: {quoted(place)}", "streams")
    return parts[1], int(parts[2] or 0)


async def read_rest(request: Request, answer_id: str, num_seen: int) -> Rest | None:
    """The answer with the frames that the client does not have yet; None if it has all. Raises ApiError."""
    admitted = await attach.find_streamed(request, answer_id)
    if not admitted.answer.numbered:
        why = "its client must have asked to come back (`resume_s`, `detached`)"
        raise invalid(f"`streams`: the frames of {answer_id} have no numbers: {why}", "streams")
    return await rest.read_rest(*admitted, num_seen)
