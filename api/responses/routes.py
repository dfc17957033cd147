"""Routes of OpenAI's Responses API: POST /v1/responses, and those of stored responses: retrieve, follow,
cancel, delete, and list their input.
"""

from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from sse_starlette import EventSourceResponse
from starlette.responses import Response

from api.errors import ApiError, cut, invalid, quoted
from api.event_loop import offload
from api.http.openapi import OPENAI, ErrorResponses, ResponseId, error_responses, event_stream, only
from api.http.sse import SSE_HEADERS, RestOfFeed
from api.json import to_json
from api.openai.response_schemas import ERROR_RESPONSES, OpenAIError
from api.protocols.openai_bodies import CHARS_OF_MESSAGE
from api.protocols.response_object import ResponseFrames
from api.protocols.responses import (
    ResponsesRequest,
    describe_response,
    has_data,
    read_conversation,
    read_items,
    read_params,
    resolve_references,
    respond,
)
from api.requests.on_pool import on_pool, read_body
from api.requests.pool import Pool
from api.requests.respond import answer_id
from api.requests.service_terms import generation_body
from api.requests.validate import validate
from api.responses.response_schemas import DeletedResponse, ResponseEvent, ResponseItemList, ResponseObject
from api.responses.stored import (
    StoredResponse,
    cancel_stored,
    delete_response,
    find_response,
    read_response,
    render_response,
)
from api.resume import attach

router = APIRouter(responses=ERROR_RESPONSES, tags=[OPENAI])
STORED_ERRORS: ErrorResponses = only(ERROR_RESPONSES, 400, 401, 403, 500, 503)
STORED_ERRORS |= error_responses(
    OpenAIError, {404: "There is no such response, or it belongs to another API key"}
)
stored_router = APIRouter(responses=STORED_ERRORS, tags=[OPENAI])
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
    body = await read_body(request, ResponsesRequest)
    return await on_pool(request, body.model, partial(create_on, request, body))


async def create_on(request: Request, body: ResponsesRequest, pool: Pool) -> Response:
    """Validate and submit the request, and respond. Raises ApiError."""
    await pool.admission.check()
    before = await read_conversation(request, body.previous_response_id)
    size = CHARS_OF_MESSAGE * len(body.input) if isinstance(body.input, list) else 0
    sees = pool.tokenizer.pictures is not None
    items = await offload(size, lambda: read_items(body.input, answer_id(request), sees))
    items = await resolve_references(request, items)
    if has_data(items):
        body = unstored(body)
    chat = await read_params(body, [*before, *items], pool)
    requests = await validate(chat.params, pool.workers.limits, pool.tokenizer, pool.pictures)
    answer = describe_response(request, pool, body, chat, requests, before, items)
    return await respond(request, pool, answer)


def unstored(body: ResponsesRequest) -> ResponsesRequest:
    """The body of a response that is not stored, as its pictures would be stored with it. Raises ApiError."""
    if body.store:
        raise invalid("`store` must be false beside pictures as data: URLs; they are not stored", "store")
    if body.background:
        raise invalid("`background` stores the response: give pictures as https: URLs", "background")
    return body.model_copy(update={"store": False})


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
    """Returns the response so far, at any gateway. With `stream`, sends its events after the one with the
    sequence number `starting_after`; another connection that follows the response ends.
    """
    stored = await find_own_response(request, response_id)
    if stream:
        return await follow_response(stored, 0 if starting_after is None else starting_after + 1)
    if starting_after is not None:
        raise invalid("`starting_after` needs `stream`: true", "starting_after")
    return json_response(await render_response(stored, await read_response(stored)))


async def follow_response(stored: StoredResponse, num_seen: int) -> Response:
    """The events that the client does not have yet. Raises ApiError."""
    pool, answer, channel = stored
    if not answer.streamed:
        raise invalid("`stream`: this response was created without `stream`: true", "stream")
    stream = await read_response(stored)
    if stream.terminal and stream.terminal.reason == "cancelled":
        frames = RestOfFeed(ResponseFrames(answer, [stream]), num_seen)
        return EventSourceResponse(
            (frame async for new in frames for frame in new), headers=SSE_HEADERS, sep="\n"
        )
    try:
        streams, rest = await attach.read_rest(pool, answer, channel, num_seen)
    except ApiError as error:
        if error.param == attach.LAST_EVENT_ID:
            text = "`starting_after` must be the sequence number of an event that was sent"
            raise invalid(f"{text}. Given: {quoted(num_seen - 1)}", "starting_after") from error
        raise
    if rest is None:
        return Response(b"", 200, SSE_HEADERS)
    return await attach.respond_with_rest(pool, answer, streams, rest, num_seen)


@stored_router.post(
    "/v1/responses/{response_id}/cancel",
    summary="Cancel a background response",
    response_model=ResponseObject,
)
async def cancel_response(request: Request, response_id: ResponseId) -> Response:
    """Ends a response that was created with `background`. A response that has ended stays as it is."""
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
    """Deletes a response and its input; a response that has not ended is cancelled first."""
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
    """Returns the input items of a response and those of the conversation before it, the newest first unless
    `order` is `asc`. The list begins after the item with the id `after`.
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
