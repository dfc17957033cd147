"""Stored responses of OpenAI's Responses API: retrieve, follow, cancel, delete, and list their input."""

import asyncio
import time
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Query, Request
from sse_starlette import EventSourceResponse
from starlette.responses import Response

from api.errors import ApiError, asking_broker, cut, invalid, quoted, unavailable
from api.http.openapi import (
    OPENAI,
    OPENAI_ERRORS,
    OpenAIError,
    ResponseId,
    Responses,
    Shape,
    answer,
    error_responses,
    event_stream,
    json_answer,
    only,
)
from api.http.sse import SSE_HEADERS, RestOfFeed
from api.json import json_response, list_object, place_of
from api.protocols.responses import (
    ITEM,
    RESPONSE_EVENT,
    RESPONSE_SHAPE,
    ResponseObjectRenderer,
    fields_of,
    find_response,
    input_of,
    read_response,
    render_response,
)
from api.requests.request_scripts import cancel_request, delete_ended
from api.resume import rest
from api.resume.attach import Admitted
from api.streams.stream import Stream

ITEM_LIST = Shape(
    "ResponseItemList",
    {
        "object": "list",
        "data": [ITEM],
        "first_id": ("msg_5f0f8c0e_i0", None),
        "last_id": ("msg_5f0f8c0e_i0", None),
        "has_more": False,
        ...: ...,
    },
)
DELETED = Shape("DeletedResponse", {"id": "resp_5f0f8c0e", "object": "response", "deleted": True})
STORED_ERRORS: Responses = only(OPENAI_ERRORS, 400, 401, 403, 500, 503)
STORED_ERRORS |= error_responses(
    OpenAIError, {404: "There is no such response, or it belongs to another API key"}
)
router = APIRouter(responses=STORED_ERRORS, tags=[OPENAI])

CANCEL_WAIT_S, CANCEL_POLL_S = 10.0, 0.05
"""How long and how often a cancelled request is asked for its end."""


async def find_own_response(request: Request, response_id: ResponseId) -> Admitted:
    """Raises ApiError: 404, 503."""
    stored = await find_response(request, response_id)
    if stored is None:
        raise ApiError(404, "not_found", f"Response with id '{cut(response_id)}' not found.")
    return stored


Found = Annotated[Admitted, Depends(find_own_response)]


@router.get(
    "/v1/responses/{response_id}",
    summary="Retrieve a response",
    responses={200: {"content": json_answer(RESPONSE_SHAPE) | event_stream([RESPONSE_EVENT])}},
)
async def retrieve_response(
    stored: Found,
    stream: bool = False,
    starting_after: Annotated[int | None, Query(ge=0)] = None,
) -> Response:
    """Returns the response so far, at any gateway. With `stream`, sends its events after the one with the
    sequence number `starting_after`; another connection that follows the response ends.
    """
    if stream:
        return await follow_response(stored, 0 if starting_after is None else starting_after + 1)
    if starting_after is not None:
        raise invalid("`starting_after` needs `stream`: true")
    return json_response(await render_response(stored, await read_response(stored)))


async def follow_response(stored: Admitted, num_seen: int) -> Response:
    """The events that the client does not have yet. Raises ApiError."""
    if not stored.answer.streamed:
        raise invalid("`stream`: this response was created without `stream`: true")
    stream = await read_response(stored)
    if stream.terminal and stream.terminal.reason == "cancelled":
        all_frames = RestOfFeed(ResponseObjectRenderer(stored.answer, [stream]).frames(), num_seen)
        return EventSourceResponse(
            (frame async for new in all_frames for frame in new), headers=SSE_HEADERS, sep="\n"
        )
    try:
        found = await rest.read_rest(stored, num_seen)
    except ApiError as error:
        if error.param == rest.LAST_EVENT_ID:
            text = "`starting_after` must be the sequence number of an event that was sent"
            raise invalid(f"{text}. Given: {quoted(num_seen - 1)}", "starting_after") from error
        raise
    return await rest.go_on([found]) if found else Response(b"", 200, SSE_HEADERS)


@router.post(
    "/v1/responses/{response_id}/cancel",
    summary="Cancel a background response",
    responses=answer(RESPONSE_SHAPE),
)
async def cancel_response(stored: Found) -> Response:
    """Ends a response that was created with `background`. A response that has ended stays as it is."""
    if not fields_of(stored.answer)["background"]:
        raise invalid(
            "Only a response that was created with `background`: true can be cancelled", "response_id"
        )
    return json_response(await render_response(stored, await cancel_stored(stored)))


@router.delete("/v1/responses/{response_id}", summary="Delete a response", responses=answer(DELETED))
async def remove_response(stored: Found, response_id: ResponseId) -> Response:
    """Deletes a response and its input; a response that has not ended is cancelled first."""
    await cancel_stored(stored)
    async with asking_broker():
        if not await delete_ended(stored.pool.client, stored.answer.request_id):
            raise unavailable("the response was cancelled, but has not ended yet: delete it again")
    return json_response({"id": response_id, "object": "response", "deleted": True})


@router.get(
    "/v1/responses/{response_id}/input_items",
    summary="List the input items of a response",
    responses=answer(ITEM_LIST),
)
async def list_input_items(
    stored: Found,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
    after: str | None = None,
) -> Response:
    """Returns the input items of a response and those of the conversation before it, the newest first unless
    `order` is `asc`. The list begins after the item with the id `after`.
    """
    items = input_of(stored.answer)[:: -1 if order == "desc" else 1]
    begin = place_of([item["id"] for item in items], after, "after") + 1
    return json_response(list_object(items[begin:], limit))


async def cancel_stored(stored: Admitted) -> Stream:
    """Cancel the request unless it has ended. Returns its stream, which has ended unless CANCEL_WAIT_S have
    passed. Raises ApiError (503).
    """
    stream = await read_response(stored)
    if not stream.terminal:
        async with asking_broker():
            await cancel_request(stored.pool.client, stored.answer.request_id)
    end_s = time.monotonic() + CANCEL_WAIT_S
    while not stream.terminal and time.monotonic() < end_s:
        await asyncio.sleep(CANCEL_POLL_S)
        stream = await read_response(stored)
    return stream
