"""Requests: what becomes of a request that was admitted, for its owner; and its cancel."""

from typing import Any

from starlette.requests import Request

from api.errors import ApiError, asking_broker
from api.resume import attach
from api.resume.admitted import Admitted, find_own
from common.broker.cancel import cancel_request
from common.messages.service_class import service_class

STATES = ("queued", "running", "finished", "cancelled", "error")


async def describe_request(admitted: Admitted) -> dict[str, Any]:
    """The state of a request, and that of each choice. Raises ApiError (503)."""
    pool, answer, _ = admitted
    streams = await attach.read_committed(*admitted)
    async with asking_broker():
        pipe = pool.client.redis.pipeline(transaction=False)
        for stream in streams:
            pipe.hmget(
                pool.client.keys.request(stream.request.request_id),
                ["worker", "attempt", "terminal", "cancel"],
            )
        hashes = await pipe.execute()
    choices = [
        {"state": choice_state(*fields), "generated_tokens": stream.num_tokens}
        for stream, fields in zip(streams, hashes, strict=True)
    ]
    first = answer.requests[0]
    return {
        "id": answer.request_id,
        "state": min((choice["state"] for choice in choices), key=STATES.index),
        "priority": service_class(first.priority),
        "tenant": first.tenant,
        "created": answer.created_s,
        "prompt_tokens": answer.num_prompt_tokens,
        "choices": choices,
    }


async def cancel_choices(admitted: Admitted) -> None:
    """Cancel all choices of a request, whoever reads them. Raises ApiError (503)."""
    async with asking_broker():
        for choice in admitted.answer.choices():
            await cancel_request(admitted.pool.client, choice.request_id)


def choice_state(
    worker: bytes | None, attempt: bytes | None, terminal: bytes | None, cancel: bytes | None
) -> str:
    """One of STATES, from the fields of the request's hash. What is cancelled may still end otherwise."""
    if terminal is not None:
        reason = terminal.decode()
        return reason if reason in STATES else "finished"
    if cancel is not None:
        return "cancelled"
    return "running" if worker or int(attempt or 0) else "queued"


async def find_request(request: Request, request_id: str) -> Admitted:
    """The request with this id, if it was asked for with the same API key. Raises ApiError: 404, 503."""
    admitted = await find_own(request, request_id)
    if admitted is None:
        why = "it is not yours, its id is wrong, or it was answered"
        raise ApiError(404, "not_found", f"There is no request {request_id[:40]}: {why}")
    return admitted
