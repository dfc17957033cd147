"""Requests: what becomes of a request that was admitted, for its owner; and its cancel."""

from typing import Any

from starlette.requests import Request

from api.errors import ApiError, asking_broker
from api.resume import attach
from api.resume.admitted import Admitted, find_own
from common.broker.cancel import cancel_request
from common.messages.service_class import service_class

STATES = ("queued", "running", "finished", "cancelled", "error")


class OwnRequest(Admitted):
    """A request of the client that asks for it."""

    @property
    def choice_ids(self) -> list[str]:
        return [choice.request_id for choice in self.answer.choices()]

    async def describe(self) -> dict[str, Any]:
        """Its state, and that of each choice. Raises ApiError (503)."""
        streams = await attach.read_committed(*self)
        async with asking_broker():
            pipe = self.pool.redis.pipeline(transaction=False)
            for request_id in self.choice_ids:
                pipe.hmget(self.pool.keys.request(request_id), ["worker", "attempt", "terminal", "cancel"])
            hashes = await pipe.execute()
        choices = [
            {"state": choice_state(*fields), "generated_tokens": stream.num_tokens}
            for stream, fields in zip(streams, hashes, strict=True)
        ]
        first = self.answer.requests[0]
        return {
            "id": self.answer.request_id,
            "state": min((choice["state"] for choice in choices), key=STATES.index),
            "priority": service_class(first.priority),
            "tenant": first.tenant,
            "created": self.answer.created_s,
            "prompt_tokens": self.answer.num_prompt_tokens,
            "choices": choices,
        }

    async def cancel(self) -> None:
        """Cancel all its choices, whoever reads them. Raises ApiError (503)."""
        async with asking_broker():
            for request_id in self.choice_ids:
                await cancel_request(self.pool.client, request_id)


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


async def find_request(request: Request, request_id: str) -> OwnRequest:
    """The request with this id, if it was asked for with the same API key. Raises ApiError: 404, 503."""
    admitted = await find_own(request, request_id)
    if admitted is None:
        why = "it is not yours, its id is wrong, or it was answered"
        raise ApiError(404, "not_found", f"There is no request {request_id[:40]}: {why}")
    return OwnRequest(*admitted)
