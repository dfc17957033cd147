"""GET and DELETE /requests/{id}: show the state of an admitted request to its owner, or cancel it."""

from collections.abc import Sequence
from typing import Literal, get_args

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from api.answers.answer import HttpAnswer
from api.errors import ApiError, asking_broker, cut
from api.http.openapi import (
    RESUME,
    TGI_ERRORS,
    ErrorResponse,
    RequestId,
    Responses,
    error_responses,
    only,
)
from api.json import json_response
from api.requests import request_scripts
from api.resume import attach
from api.resume.attach import Admitted, find_own
from api.streams.stream import Stream
from common.messages.request import SERVICE_CLASSES, class_index, service_class

State = Literal["queued", "running", "finished", "cancelled", "error"]
STATES: tuple[State, ...] = get_args(State)
"""From the earliest to the latest: the state of a request is the earliest of its choices'."""
FIELDS = ["digest", "terminal", "cancel", "worker", "attempt"]
"""Of a request's hash; all but the first may be missing."""
ERRORS: Responses = only(TGI_ERRORS, 401, 403, 503)
ERRORS |= error_responses(ErrorResponse, {404: "There is no such request, or it belongs to another API key"})
router = APIRouter(responses=ERRORS, tags=[RESUME])


class ChoiceState(BaseModel):
    """One choice of a request."""

    state: State
    generated_tokens: int


class RequestState(BaseModel):
    """A request that was admitted. It ends when all its choices have ended."""

    id: str
    state: State
    priority: Literal["interactive", "standard", "batch"]
    tenant: str
    created: int = Field(description="Unix time of its admission.")
    prompt_tokens: int
    queue_position: int | None = Field(
        description="While it is queued: how many requests wait that are of its class or a more urgent one, "
        "itself included. Tenants take turns, so it may start sooner. Null afterwards."
    )
    choices: list[ChoiceState]


@router.get("/requests/{request_id}", summary="Show a request", response_model=RequestState)
async def show_request(request: Request, request_id: RequestId) -> Response:
    """Returns the state of a request, at any gateway, while it runs, or while its stream is kept for a client
    that comes back. Its id is in the header `x-request-id` of a stream.
    """
    own = await find_request(request, request_id)
    streams, states = await attach.read_committed(*own), await read_states(own)
    position = await read_position(own) if earliest(states) == "queued" else None
    return render_request(own.answer, streams, states, position)


@router.delete("/requests/{request_id}", summary="Cancel a request", response_model=RequestState)
async def cancel_request(request: Request, request_id: RequestId) -> Response:
    """Cancels all choices of a request, whatever connection reads its answer: a stream ends with an error. A
    request that has ended stays as it is. Returns its state, with the number of tokens before the cancel.
    """
    own = await find_request(request, request_id)
    streams = await attach.read_committed(*own)
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


async def read_states(admitted: Admitted, is_cancelled: bool = False) -> list[State]:
    """The state of each choice. A reader deletes choices that have ended: a deleted choice has finished, or
    was cancelled if the request `is_cancelled`. Raises ApiError: 503, and 404 if all choices have finished.
    """
    hashes = await attach.read_fields(admitted.pool, admitted.answer, FIELDS)
    if not is_cancelled and not any(digest for digest, *_ in hashes):
        raise unknown_request(admitted.answer.request_id)
    deleted: State = "cancelled" if is_cancelled else "finished"
    return [deleted if digest is None else choice_state(*fields) for digest, *fields in hashes]


async def read_position(admitted: Admitted) -> int | None:
    """How many requests wait in the pool, of this request's class and more urgent ones; None while no batcher
    counts them. Raises ApiError (503).
    """
    client, index = admitted.pool.client, class_index(admitted.answer.requests[0].class_name)
    names = [f"waiting_{name}" for name in SERVICE_CLASSES[: index + 1]]
    async with asking_broker():
        counts = await client.redis.hmget(client.keys.state, names)  # type: ignore[misc]
    return None if None in counts else max(1, sum(map(int, counts)))  # it may not be counted yet


def earliest(states: Sequence[State]) -> State:
    """The state of a request, from those of its choices."""
    return min(states, key=STATES.index)


def choice_state(
    terminal: bytes | None, cancel: bytes | None, worker: bytes | None, attempt: bytes | None
) -> State:
    """The state of a choice, from the fields of its hash. With a `cancel`, it may still end otherwise."""
    if terminal is not None:
        return next((state for state in STATES if state == terminal.decode()), "finished")
    if cancel is not None:
        return "cancelled"
    return "running" if worker or int(attempt or 0) else "queued"


def render_request(
    answer: HttpAnswer, streams: Sequence[Stream], states: Sequence[State], position: int | None = None
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
