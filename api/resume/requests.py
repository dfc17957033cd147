"""Requests: what becomes of a request that was admitted, for its owner; and its cancel."""

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request

from api.errors import ApiError, asking_broker, cut
from api.resume import attach
from api.resume.admitted import Admitted, find_own
from api.streams.stream import Stream
from common.broker import cancel
from common.messages.answer import HttpAnswer
from common.messages.service_class import service_class

STATES = ("queued", "running", "finished", "cancelled", "error")
FIELDS = ["digest", "terminal", "cancel", "worker", "attempt"]
"""Of a request's hash; all but the first may be missing."""


async def show_request(admitted: Admitted) -> dict[str, Any]:
    """The state of a request, and that of each choice. Raises ApiError: 404, 503."""
    streams = await attach.read_committed(*admitted)
    return describe(admitted.answer, streams, await read_states(admitted))


async def cancel_request(admitted: Admitted) -> dict[str, Any]:
    """Cancel all choices of a request, whoever reads them, and show it with the tokens that it had. Raises as
    `show_request`.
    """
    streams = await attach.read_committed(*admitted)
    async with asking_broker():
        outcomes = [
            await cancel.cancel_request(admitted.pool.client, choice.request_id)
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
    terminal: bytes | None, cancel: bytes | None, worker: bytes | None, attempt: bytes | None
) -> str:
    """One of STATES, from the fields of the request's hash. What is cancelled may still end otherwise."""
    if terminal is not None:
        reason = terminal.decode()
        return reason if reason in STATES else "finished"
    if cancel is not None:
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
