"""POST /requests/streams: goes on with several streamed answers on one connection. A browser opens six
connections to a server over HTTP/1.1, so a page could not read more answers at once.
"""

import asyncio
from typing import Annotated

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field
from sse_starlette import EventSourceResponse
from starlette.responses import Response

from api.errors import invalid, quoted
from api.http import body
from api.http.openapi import (
    RESUME,
    TGI_ERRORS,
    ErrorResponse,
    Responses,
    error_responses,
    json_body,
    only,
)
from api.requests.service_terms import own_pool
from api.resume import attach, rest
from api.resume.merged_streams import respond_with_rests
from api.resume.rest import Rest
from common.ids import FRAME_ID

MAX_STREAMS = 64
DescribedPlace = Annotated[str, Field(json_schema_extra={"pattern": f"^{FRAME_ID.pattern}$"})]
EXAMPLE = {"streams": ["5f0f8c0e4d7b4c6f9a3e2b1d0c9f8e7a", "0c9f8e7a5f0f8c0e4d7b4c6f9a3e2b1d/7"]}
ERRORS: Responses = only(TGI_ERRORS, 400, 401, 403, 413, 415, 422, 424, 503)
ERRORS |= error_responses(
    ErrorResponse,
    {
        404: "One of these answers does not exist, or belongs to another API key",
        410: "One of these answers was cancelled: nobody came back for it in time",
    },
)
router = APIRouter(responses=ERRORS, tags=[RESUME])


class StreamPlaces(BaseModel):
    streams: Annotated[list[DescribedPlace], Field(min_length=1, max_length=MAX_STREAMS)] = Field(
        description="Ids of streamed answers that were requested with `resume_s` or `detached`. After a "
        "slash each may have the number of the last frame that the client has."
    )


@router.post(
    "/requests/streams",
    summary="Go on with several streamed answers",
    openapi_extra=json_body(StreamPlaces, EXAMPLE),
    responses={
        200: {"description": "The frames after these of all answers, as they come"},
        204: {"description": "The client has all frames"},
    },
    response_class=EventSourceResponse,
)
async def read_streams(request: Request) -> Response:
    """Sends the frames of all these answers on one connection, each as soon as it is there. The id of a frame
    is `{answer}/{number}`: the last one of each answer says where it goes on after a lost connection.
    """
    asked = await body.read(request, StreamPlaces, own_pool(request).settings.payload_limit)
    places = [read_place(place) for place in asked.streams]
    if len({answer_id for answer_id, _ in places}) < len(places):
        raise invalid("`streams` names an answer twice", "streams")
    found = await asyncio.gather(*(read_rest(request, *place) for place in places))
    rests = [rest for rest in found if rest is not None]
    return await respond_with_rests(rests) if rests else Response(status_code=204)


def read_place(place: str) -> tuple[str, int]:
    """The answer's id, and the number of frames that the client has. Raises ApiError (422)."""
    if (parts := FRAME_ID.fullmatch(place)) is None:
        why = (
            f"`streams` must have ids of answers, or ids of frames (`{{answer}}/{{number}}`): {quoted(place)}"
        )
        raise invalid(why, "streams")
    return parts[1], int(parts[2] or 0)


async def read_rest(request: Request, answer_id: str, num_seen: int) -> Rest | None:
    """The answer with the frames that the client does not have yet; None if it has all. Raises ApiError."""
    admitted = await attach.find_own(request, answer_id)
    if admitted is None or not admitted.answer.streamed:
        raise attach.unknown_answer(answer_id)
    if not admitted.answer.numbered:
        why = "its client must have asked to come back (`resume_s`, `detached`)"
        raise invalid(f"`streams`: the frames of {answer_id} have no numbers: {why}", "streams")
    return await rest.read_rest(*admitted, num_seen)
