"""Rest: what a client that comes back gets: the frames of an answer that it does not have yet (of several
answers on one connection, too), the state of a request, and the answer to a request that it sends again.
"""

import asyncio
import time
from collections.abc import Sequence
from typing import Annotated

from fastapi import APIRouter, Header, Request
from pydantic import BaseModel, Field
from sse_starlette import EventSourceResponse
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from api.answers.answer import HttpAnswer
from api.errors import ApiError, asking_broker, cut, failed, invalid, quoted, unavailable
from api.http import body
from api.http.body import REPLAYED, Repeated, check_same, idempotency_key, noted_digest, read_bytes
from api.http.middleware import STREAM_PATH, error_response, handle_api_error, handle_disconnect
from api.http.openapi import (
    RESUME,
    TGI_ERRORS,
    ErrorResponse,
    RequestId,
    Responses,
    Shape,
    error_responses,
    json_answer,
    json_body,
    only,
)
from api.http.sse import MergedFeed, RestOfFeed
from api.json import json_response
from api.protocols.protocol import errors_of, row_of
from api.protocols.responses import fields_of, read_response, render_response
from api.protocols.table import protocol_of
from api.requests import request_scripts
from api.requests.request_scripts import delete_ended
from api.requests.service_terms import REQUEST_ID_HEADER, answer_id, own_pool, pools_of
from api.resume import attach
from api.resume.attach import Admitted, find_own
from api.streams.http_response import Reader, TokenStream, client_gone, render_whole
from api.streams.stream import Stream
from common.broker.client import CONNECT_TIMEOUT_S
from common.broker.committed import Committed
from common.ids import FRAME_ID
from common.messages.events import FINISHED
from common.messages.request import SERVICE_CLASSES, class_index, service_class
from common.process.event_loop import run_until_one_ends

LAST_EVENT_ID = "Last-Event-ID"
READ_AGAIN_S, READ_PAUSE_S = 2.0, 0.1
"""How long and how often an answer is read again that has fewer frames than its client says."""


async def read_rest(admitted: Admitted, num_seen: int) -> Reader | None:
    """The answer with the frames that the client does not have yet; None if it has all.

    A read may miss tokens that are being moved, from a log to a string or to another worker. So an answer is
    read again before a client's number of frames is refused.

    Raises ApiError: 410, 422 if fewer frames than that are committed, 424, 503.
    """
    answer, end_s = admitted.answer, time.monotonic() + READ_AGAIN_S
    while True:
        streams = await attach.read_committed(admitted)
        frames = RestOfFeed(protocol_of(answer.route).renderer(answer, streams).frames(), num_seen)
        await frames.prepare()
        failure = next((one.terminal for one in streams if one.terminal and not one.finished), None)
        if any(stream.terminal and stream.terminal.reason == "cancelled" for stream in streams):
            raise attach.cancelled_answer(answer.request_id)
        if not frames.num_seen:
            break
        if failure:  # a failed request keeps no tokens
            raise failed(failure)
        if time.monotonic() > end_s:
            raise invalid(
                f"`{LAST_EVENT_ID}` must be the id of a frame that was sent: this answer has "
                f"{num_seen - frames.num_seen} so far. Given: {quoted(num_seen)}"
            )
        await asyncio.sleep(READ_PAUSE_S)
    if not frames.first and all(stream.terminal for stream in streams):
        frames.first = await anext(frames.source, [])
        if not frames.first:
            return None
    return Reader(admitted.pool, answer, streams, 0, num_seen, frames)


async def go_on(readers: Sequence[Reader], merged: MergedFeed | None = None) -> TokenStream:
    """Become the reader of each answer, and send their frames. Raises ApiError: then those that were read
    already wait for their client again.
    """
    try:
        for reader in readers:
            reader.number = await attach.become_reader(reader.pool, reader.streams)
    except BaseException:
        for reader in readers:
            if reader.number:
                reader.release()
        raise
    return TokenStream(readers, {}, merged)


# --- the stream of an answer --------------------------------------------------------------------------------


LastEventId = Annotated[
    str,
    Header(
        alias=LAST_EVENT_ID,
        pattern="^[0-9]{1,9}$",
        description="The `id` of the last frame that the client has. Default: it has none.",
    ),
]
ERRORS: Responses = only(TGI_ERRORS, 400, 401, 403, 413, 415, 422, 424, 503)
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
    responses={
        200: {"description": "The frames after that one, as the first route sends them"},
        204: {"description": "The client has all frames"},
    },
    response_class=EventSourceResponse,
)
async def resume_stream(
    request: Request, request_id: RequestId, last_event_id: LastEventId = "0"
) -> Response:
    """Sends the frames after `Last-Event-ID`, at any gateway, as the first connection would have sent them.
    The path is in the header `content-location` of the first response. Another connection with the same
    answer ends. A POST with `Last-Event-ID`, and the request's id in `x-request-id`, does the same.
    """
    found = await read_rest(await find_streamed(request, request_id), int(last_event_id))
    return await go_on([found]) if found else Response(status_code=204)


async def find_streamed(request: Request, request_id: str) -> Admitted:
    """The client's own streamed answer with this id. Raises ApiError: 404, 503."""
    admitted = await find_own(request, request_id)
    if admitted is None or not admitted.answer.streamed:
        raise attach.unknown_answer(request_id)
    return admitted


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


# --- streams of several answers -----------------------------------------------------------------------------


MAX_STREAMS = 64
DescribedPlace = Annotated[str, Field(json_schema_extra={"pattern": f"^{FRAME_ID.pattern}$"})]
EXAMPLE = {"streams": ["5f0f8c0e4d7b4c6f9a3e2b1d0c9f8e7a", "0c9f8e7a5f0f8c0e4d7b4c6f9a3e2b1d/7"]}


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
    if len({name for name, _ in places}) < len(places):
        raise invalid("`streams` names an answer twice")
    found = await asyncio.gather(*(find_rest(request, *place) for place in places))
    readers = {one.answer.request_id: one for one in found if one is not None}
    if not readers:
        return Response(status_code=204)
    merged = MergedFeed({name: one.frames for name, one in readers.items() if one.frames})
    return await go_on([*readers.values()], merged)


def read_place(place: str) -> tuple[str, int]:
    """The answer's id, and the number of frames that the client has. Raises ApiError (422)."""
    if (parts := FRAME_ID.fullmatch(place)) is None:
        why = (
            f"`streams` must have ids of answers, or ids of frames (`{{answer}}/{{number}}`): {quoted(place)}"
        )
        raise invalid(why, "streams")
    return parts[1], int(parts[2] or 0)


async def find_rest(request: Request, name: str, num_seen: int) -> Reader | None:
    """The answer with the frames that the client does not have yet; None if it has all. Raises ApiError."""
    admitted = await find_streamed(request, name)
    if not admitted.answer.numbered:
        why = "its client must have asked to come back (`resume_s`, `detached`)"
        raise invalid(f"`streams`: the frames of {name} have no numbers: {why}")
    return await read_rest(admitted, num_seen)


# --- the state of a request ---------------------------------------------------------------------------------


STATES = ("queued", "running", "finished", "cancelled", "error")
"""From the earliest to the latest: the state of a request is the earliest of its choices'."""
STATE_ERRORS: Responses = only(TGI_ERRORS, 401, 403, 503)
STATE_ERRORS |= error_responses(
    ErrorResponse, {404: "There is no such request, or it belongs to another API key"}
)
state_router = APIRouter(responses=STATE_ERRORS, tags=[RESUME])


STATE_ANSWER: Responses = {
    200: {
        "content": json_answer(
            Shape(
                "RequestState",
                {
                    "id": "5f0f8c0e4d7b4c6f9a3e2b1d0c9f8e7a",
                    "state": STATES,
                    "priority": SERVICE_CLASSES,
                    "tenant": "acme",
                    "created": 1764000000,
                    "prompt_tokens": 12,
                    "queue_position": (None, 1),
                    "choices": [{"state": STATES, "generated_tokens": 20}],
                },
            )
        )
    }
}


@state_router.get(
    "/requests/{request_id}",
    summary="Show a request",
    responses=STATE_ANSWER,
)
async def show_request(request: Request, request_id: RequestId) -> Response:
    """Returns the state of a request, at any gateway, while it runs, or while its stream is kept for a client
    that comes back. Its id is in the header `x-request-id` of a stream. It ends when all its choices have.
    `queue_position` says, while it is queued, how many requests wait that are of its class or a more urgent
    one, itself included; tenants take turns, so it may start sooner.
    """
    own = await find_request(request, request_id)
    streams, states = await attach.read_committed(own), await read_states(own)
    position = await read_position(own) if earliest(states) == "queued" else None
    return render_request(own.answer, streams, states, position)


@state_router.delete(
    "/requests/{request_id}",
    summary="Cancel a request",
    responses=STATE_ANSWER,
)
async def cancel_request(request: Request, request_id: RequestId) -> Response:
    """Cancels all choices of a request, whatever connection reads its answer: a stream ends with an error. A
    request that has ended stays as it is. Returns its state, with the number of tokens before the cancel.
    """
    own = await find_request(request, request_id)
    streams = await attach.read_committed(own)
    async with asking_broker():
        outcomes = [
            await request_scripts.cancel_request(own.pool.client, choice.request_id)
            for choice in own.answer.choices()
        ]
    return render_request(own.answer, streams, await read_states(own, any(outcomes)))


async def find_request(request: Request, request_id: str) -> Admitted:
    """The request with this id, if it was sent with the same API key. Raises ApiError: 404, 503."""
    admitted = await find_own(request, request_id)
    if admitted is None:
        raise unknown_request(request_id)
    return admitted


def unknown_request(request_id: str) -> ApiError:
    why = "it is not yours, its id is wrong, or it was answered"
    return ApiError(404, "not_found", f"There is no request {cut(request_id)}: {why}")


async def read_states(admitted: Admitted, is_cancelled: bool = False) -> list[str]:
    """The state of each choice. A reader deletes choices that have ended: a deleted choice has finished, or
    was cancelled if the request `is_cancelled`. Raises ApiError: 503, and 404 if all choices have finished.
    """
    states = await attach.read_states(admitted)
    if not is_cancelled and not any(state.known for state in states):
        raise unknown_request(admitted.answer.request_id)
    deleted = "cancelled" if is_cancelled else "finished"
    return [choice_state(state) if state.known else deleted for state in states]


async def read_position(admitted: Admitted) -> int | None:
    """How many requests wait in the pool, of this request's class and more urgent ones; None while no batcher
    counts them. Raises ApiError (503).
    """
    client, index = admitted.pool.client, class_index(admitted.answer.requests[0].class_name)
    names = [f"waiting_{name}" for name in SERVICE_CLASSES[: index + 1]]
    async with asking_broker():
        counts = await client.redis.hmget(client.keys.state, names)  # type: ignore[misc]
    return None if None in counts else max(1, sum(map(int, counts)))  # it may not be counted yet


def earliest(states: Sequence[str]) -> str:
    """The state of a request, from those of its choices."""
    return min(states, key=STATES.index)


def choice_state(state: Committed) -> str:
    """The state of a choice that is known. With a cancel, it may still end otherwise."""
    if state.terminal:
        return state.terminal if state.terminal in STATES else "finished"
    if state.cancelled:
        return "cancelled"
    return "running" if state.worker or state.attempt else "queued"


def render_request(
    answer: HttpAnswer, streams: Sequence[Stream], states: Sequence[str], position: int | None = None
) -> Response:
    """The request and its choices, with their states and the numbers of tokens that their streams have."""
    first = answer.requests[0]
    content = {
        "id": answer.request_id,
        "state": earliest(states),
        "priority": service_class(first.class_name),
        "tenant": first.tenant,
        "created": answer.created_s,
        "prompt_tokens": answer.num_prompt_tokens,
        "queue_position": position,
        "choices": [
            {"state": state, "generated_tokens": output.num_tokens}
            for state, stream in zip(states, streams, strict=True)
            for output in stream.outputs
        ],
    }
    return json_response(content)


# --- repeated requests --------------------------------------------------------------------------------------


POLL_S = 0.1
"""How often an answer that is not streamed is asked for its end."""


async def check_repeated(request: Request) -> None:
    """Dependency of routes that make answers. Raises Repeated if an earlier request with this key has one,
    in whatever pool; ApiError: 400, 503. An answer that failed, or was cancelled, is forgotten: the request
    is served anew. So it is if the earlier gateway died while it admitted some of several choices.
    """
    if request.method != "POST" or not idempotency_key(request):
        return
    if (admitted := await find_own(request, answer_id(request))) is None:
        return
    states = await attach.read_states(admitted)
    if not all(state.known for state in states):
        return
    if all(state.terminal in ("", *FINISHED) for state in states):
        raise Repeated(admitted.answer.request_id)
    async with asking_broker():
        for choice in admitted.answer.choices():
            await delete_ended(admitted.pool.client, choice.request_id)


async def replay(request: Request, repeated: Repeated) -> Response:
    """Exception handler: respond with the answer of the earlier request."""
    try:
        response = await respond(request, repeated.request_id)
    except ApiError as error:
        return await handle_api_error(request, error)
    except ClientDisconnect as error:
        return await handle_disconnect(request, error)
    response.headers[REPLAYED] = "true"
    return response


async def respond(request: Request, request_id: str) -> Response:
    """The answer from its start. Raises ApiError: 409, 410, 413, 424, 503; ClientDisconnect."""
    if not noted_digest(request):  # the route has not read it
        await read_bytes(request, pools_of(request).max_body_bytes)
    admitted = await find_admitted(request, request_id)
    check_same(request, admitted.answer.terms.body)
    pool, answer, _ = admitted
    if answer.streamed:
        found = await read_rest(admitted, 0)
        assert found is not None, "every stream has a frame"
        return await go_on([found])
    if answer.response is not None and fields_of(answer)["background"]:
        return json_response(await render_response(admitted, await read_response(admitted)))
    await run_until_one_ends(wait_for_end(admitted), client_gone(request))
    streams = await attach.read_committed(admitted)
    if not all(stream.finished for stream in streams):
        raise lost()
    arrived_s = time.monotonic() - attach.age_s(pool, answer)
    content, headers = await render_whole(protocol_of(answer.route).renderer(answer, streams), arrived_s)
    return Response(content, 200, headers, "application/json")


async def find_admitted(request: Request, request_id: str) -> Admitted:
    """The answer of the earlier request, which may be on its way to the broker. Raises ApiError (503) if it
    does not arrive.
    """
    end_s = time.monotonic() + CONNECT_TIMEOUT_S
    while (admitted := await find_own(request, request_id)) is None:
        if time.monotonic() > end_s:
            raise unavailable("the earlier request with this key was not admitted: ask again")
        await asyncio.sleep(POLL_S)
    return admitted


def lost() -> ApiError:
    return unavailable("the answer to the earlier request with this key has just expired: ask again")


async def wait_for_end(admitted: Admitted) -> None:
    """Wait until all choices have ended, without becoming their reader: the earlier request may have one.
    Raises ApiError (503) if the answer is gone meanwhile, or failed: the next repetition is served anew.
    """
    while True:
        states = await attach.read_states(admitted)
        if not all(state.known for state in states):
            raise lost()
        if not all(state.terminal in ("", *FINISHED) for state in states):
            raise unavailable("the earlier request has just failed: ask again")
        if all(state.terminal for state in states):
            return
        await asyncio.sleep(POLL_S)
