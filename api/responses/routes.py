"""POST /v1/responses: as in OpenAI's Responses API.

Routes of stored responses: retrieve, follow, cancel, delete, and list their input.
"""

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from sse_starlette import EventSourceResponse
from starlette.responses import Response

from api.errors import ApiError, cut, invalid, quoted
from api.event_loop import offload
from api.http.middleware import request_id
from api.http.openapi import OPENAI, ErrorResponses, ResponseId, error_responses, event_stream
from api.http.sse import SSE_HEADERS, RestOfFeed
from api.json import to_json
from api.openai.params import CHARS_OF_MESSAGE
from api.openai.response_object import ResponseFrames
from api.openai.response_schemas import ERROR_RESPONSES, OpenAIError
from api.requests.pool_registry import pool_and_body
from api.requests.service_terms import generation_body
from api.requests.validate import validate
from api.responses.chat_request import read_conversation, read_params, resolve_references
from api.responses.input_items import read_items
from api.responses.request_schemas import ResponsesRequest
from api.responses.respond import describe_response, respond
from api.responses.response_schemas import (
    DeletedResponse,
    ResponseEvent,
    ResponseItemList,
    ResponseObject,
)
from api.responses.stored import (
    StoredResponse,
    cancel_stored,
    delete_response,
    find_response,
    read_response,
    render_response,
)
from api.resume import attach
from api.streams.http_response import TokenStream

router = APIRouter(responses=ERROR_RESPONSES, tags=[OPENAI])
EXAMPLE = {"input": "Why is the sky blue?", "max_output_tokens": 100}


@router.post(
    "/v1/responses",
    summary="Create a response",
    openapi_extra=generation_body(ResponsesRequest, EXAMPLE),
    responses={200: {"model": ResponseObject, "content": event_stream([ResponseEvent])}},
)
async def create_response(request: Request) -> Response:
    """Generates the next items of a conversation. With `stream`, they come as typed events with sequence
    numbers. With `background`, the response is queued, and outlives every process of the fleet.
    """
    pool, asked = await pool_and_body(request, ResponsesRequest)
    await pool.admission.check()
    before = await read_conversation(request, asked.previous_response_id)
    size = CHARS_OF_MESSAGE * len(asked.input) if isinstance(asked.input, list) else 0
    items = await offload(size, lambda: read_items(asked.input, request_id(request)))
    items = await resolve_references(request, items)
    chat = await read_params(asked, [*before, *items], pool)
    requests = await validate(chat.params, pool.workers.limits, pool.tokenizer)
    answer = describe_response(request, pool, asked, chat, requests, before, items)
    return await respond(request, pool, answer)


ERRORS: ErrorResponses = {status: ERROR_RESPONSES[status] for status in (400, 401, 403, 500, 503)}
ERRORS |= error_responses(OpenAIError, {404: "There is no such response, or it belongs to another API key"})
stored_router = APIRouter(responses=ERRORS, tags=[OPENAI])


async def find_own_response(request: Request, response_id: str) -> StoredResponse:
    """Raises ApiError: 404, 503."""
    stored = await find_response(request, response_id)
    if stored is None:
        raise ApiError(404, "not_found", f"Response with id '{cut(response_id)}' not found.")
    return stored


def json_response(content: dict[str, Any]) -> Response:
    return Response(to_json(content), media_type="application/json")


@stored_router.get(
    "/v1/responses/{response_id}",
    summary="Retrieve a response",
    responses={200: {"model": ResponseObject, "content": event_stream([ResponseEvent])}},
)
async def retrieve_response(
    request: Request,
    response_id: ResponseId,
    stream: bool = False,
    starting_after: Annotated[int | None, Query(ge=0)] = None,
) -> Response:
    """The response with what is made of it so far, at any gateway. With `stream`, its events behind the one
    with the sequence number `starting_after`; another connection with the same response ends.
    """
    stored = await find_own_response(request, response_id)
    if stream:
        return await follow_response(stored, 0 if starting_after is None else starting_after + 1)
    if starting_after is not None:
        raise invalid("`starting_after` needs `stream`: true", "starting_after")
    return json_response(await render_response(stored, await read_response(stored)))


async def follow_response(stored: StoredResponse, num_seen: int) -> Response:
    """The events behind those that the client has. Raises ApiError."""
    pool, answer, channel = stored.pool, stored.answer, stored.channel
    if not answer.streamed:
        raise invalid("`stream`: this response was created without `stream`: true", "stream")
    stream = await read_response(stored)
    if stream.terminal and stream.terminal.reason == "cancelled":
        rest = RestOfFeed(ResponseFrames(answer, [stream]), num_seen)
        frames = (frame async for new in rest for frame in new)
        return EventSourceResponse(frames, headers=SSE_HEADERS, sep="\n")
    try:
        streams, behind = await attach.read_behind(pool, answer, channel, num_seen)
    except ApiError as error:
        if error.param == attach.HEADER:
            text = "`starting_after` must be the sequence number of an event that was sent"
            raise invalid(f"{text}. Given: {quoted(num_seen - 1)}", "starting_after") from error
        raise
    if behind is None:
        return Response(b"", 200, SSE_HEADERS)
    reader = await attach.become_reader(pool, streams)
    return TokenStream(
        answer,
        frames=behind,
        streams=streams,
        headers={},
        release=pool.admission.release,
        reader=reader,
        num_seen=num_seen,
    )


@stored_router.post(
    "/v1/responses/{response_id}/cancel",
    summary="Cancel a background response",
    response_model=ResponseObject,
)
async def cancel_response(request: Request, response_id: ResponseId) -> Response:
    """Ends a response that was created with `background`. One that has ended stays as it is."""
    stored = await find_own_response(request, response_id)
    if not stored.answer.terms.detached:
        raise invalid(
            "Only a response that was created with `background`: true can be cancelled", "response_id"
        )
    return json_response(await render_response(stored, await cancel_stored(stored)))


@stored_router.delete(
    "/v1/responses/{response_id}", summary="Delete a response", response_model=DeletedResponse
)
async def remove_response(request: Request, response_id: ResponseId) -> Response:
    """Deletes a response and its input; one that is still made is cancelled first."""
    stored = await find_own_response(request, response_id)
    await delete_response(stored)
    return json_response({"id": response_id, "object": "response", "deleted": True})


@stored_router.get(
    "/v1/responses/{response_id}/input_items",
    summary="List the input items of a response",
    response_model=ResponseItemList,
)
async def list_input_items(
    request: Request,
    response_id: ResponseId,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
    after: str | None = None,
) -> Response:
    """The items from which a response was made, with those of the conversation before it; the newest first,
    unless `order` is `asc`. `after` is the id of the item behind which the list begins.
    """
    stored = await find_own_response(request, response_id)
    items = stored.input
    if order == "desc":
        items.reverse()
    if after is not None:
        ids = [item["id"] for item in items]
        if after not in ids:
            raise invalid(f"`after`: there is no item {quoted(after)}", "after")
        items = items[ids.index(after) + 1 :]
    page = items[:limit]
    return json_response(
        {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None,
            "has_more": len(items) > len(page),
        }
    )
