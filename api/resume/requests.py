"""Requests: what becomes of a request that was admitted, for its owner; and its cancel.

GET and DELETE /requests/{id}: the state of a request, and its cancel.
"""

from collections.abc import Sequence
from typing import Any, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from api.errors import ApiError, asking_broker, cut
from api.http.openapi import RESUME, ErrorResponses, RequestId, error_responses
from api.json import to_json
from api.resume import attach
from api.resume.attach import Admitted, find_own
from api.streams.stream import Stream
from api.tgi.response_schemas import ERROR_RESPONSES, ErrorResponse
from common.broker import pool_client
from common.messages.answer import HttpAnswer
from common.messages.request import service_class

STATES = ("queued", "running", "finished", "cancelled", "error")
FIELDS = ["digest", "terminal", "cancel", "worker", "attempt"]
"""Of a request's hash; all but the first may be missing."""


async def describe_request(admitted: Admitted) -> dict[str, Any]:
    """The state of a request, and that of each choice. Raises ApiError: 404, 503."""
    streams = await attach.read_committed(*admitted)
    return describe(admitted.answer, streams, await read_states(admitted))


async def cancel_accepted(admitted: Admitted) -> dict[str, Any]:
    """Cancel all choices of a request, whoever reads them, and show it with the tokens that it had. Raises as
    `show_request`.
    """
    streams = await attach.read_committed(*admitted)
    async with asking_broker():
        outcomes = [
            await pool_client.cancel_request(admitted.pool.client, choice.request_id)
            for choice in admitted.answer.choices()
        ]
    return describe(admitted.answer, streams, await read_states(admitted, any(outcomes)))


async def read_states(admitted: Admitted, is_cancelled: bool = False) -> list[str]:
    """One of STATES for each choice. Their reader deletes what has ended: a choice that is gone has finished,
    or has ended because the request `is_cancelled`. Raises ApiError: 503, and 404 when all have finished so.
    """
    client = admitted.pool.client
    async with asking_broker():
        pipe = client.redis.pipeline(transaction=False)
        for choice in admitted.answer.choices():
            pipe.hmget(client.keys.request(choice.request_id), FIELDS)
        hashes = await pipe.execute()
    if not is_cancelled and not any(digest for digest, *_ in hashes):
        raise unknown_request(admitted.answer.request_id)
    gone = "cancelled" if is_cancelled else "finished"
    return [gone if digest is None else choice_state(*fields) for digest, *fields in hashes]


def choice_state(
    terminal: bytes | None, pool_client: bytes | None, worker: bytes | None, attempt: bytes | None
) -> str:
    """One of STATES, from the fields of the request's hash. What is cancelled may still end otherwise."""
    if terminal is not None:
        reason = terminal.decode()
        return reason if reason in STATES else "finished"
    if pool_client is not None:
        return "cancelled"
    return "running" if worker or int(attempt or 0) else "queued"


def describe(answer: HttpAnswer, streams: Sequence[Stream], states: Sequence[str]) -> dict[str, Any]:
    """The request with its choices: their states, and how many tokens their streams have."""
    first = answer.requests[0]
    return {
        "id": answer.request_id,
        "state": min(states, key=STATES.index),
        "priority": service_class(first.class_name),
        "tenant": first.tenant,
        "created": answer.created_s,
        "prompt_tokens": answer.num_prompt_tokens,
        "choices": [
            {"state": state, "generated_tokens": stream.num_tokens}
            for state, stream in zip(states, streams, strict=True)
        ],
    }


async def find_request(request: Request, request_id: str) -> Admitted:
    """The request with this id, if it was asked for with the same API key. Raises ApiError: 404, 503."""
    admitted = await find_own(request, request_id)
    if admitted is None:
        raise unknown_request(request_id)
    return admitted


def unknown_request(request_id: str) -> ApiError:
    why = "it is not yours, its id is wrong, or it was answered"
    return ApiError(404, "not_found", f"There is no request {cut(request_id)}: {why}")


State = Literal["queued", "running", "finished", "cancelled", "error"]
ERRORS: ErrorResponses = {status: ERROR_RESPONSES[status] for status in (401, 403, 503)}
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
    choices: list[ChoiceState]


@router.get("/requests/{request_id}", summary="Show a request", response_model=RequestState)
async def show_request(request: Request, request_id: RequestId) -> Response:
    """What becomes of a request, at any gateway: of one that runs, or whose stream is kept for a client that
    comes back. Its id is in the header `x-request-id` of a stream.
    """
    own = await find_request(request, request_id)
    return Response(to_json(await describe_request(own)), media_type="application/json")


@router.delete("/requests/{request_id}", summary="Cancel a request", response_model=RequestState)
async def cancel_request(request: Request, request_id: RequestId) -> Response:
    """Ends a request, whoever reads its answer: a stream ends with an error. One that has ended stays as it
    is.
    """
    own = await find_request(request, request_id)
    return Response(to_json(await cancel_accepted(own)), media_type="application/json")
