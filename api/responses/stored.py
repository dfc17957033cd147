"""Stored responses: found by id and API key, read with their tokens, cancelled, deleted."""

import asyncio
import time
from typing import Any

import orjson
from starlette.requests import Request

from api.errors import asking_broker, unavailable
from api.event_loop import offload
from api.protocols.response_object import Item, ResponseObjectRenderer
from api.resume import attach
from api.resume.attach import Admitted, find_own
from api.streams.kept_answers import delete_ended
from api.streams.stream import Stream
from common.broker.request_scripts import cancel_request
from common.ids import RESPONSE_ID

CANCEL_WAIT_S, CANCEL_POLL_S = 10.0, 0.05
"""How long and how often a cancelled request is asked for its end."""


class StoredResponse(Admitted):
    """A stored response, which may not have ended yet."""

    @property
    def input(self) -> list[Item]:
        """The items of the conversation before the response, then its own input items."""
        assert self.answer.response is not None
        return [*orjson.loads(self.answer.response.before), *orjson.loads(self.answer.response.items)]


async def find_response(request: Request, response_id: str) -> StoredResponse | None:
    """The response with this id, if it was created with this request's API key. Raises ApiError (503)."""
    matched = RESPONSE_ID.fullmatch(response_id)
    admitted = await find_own(request, matched[1]) if matched else None
    if admitted is None or admitted.answer.response is None or not admitted.answer.terms.stored_ms:
        return None
    return StoredResponse(*admitted)


async def read_response(stored: StoredResponse) -> Stream:
    """The response's stream, with what is committed so far. Raises ApiError (503)."""
    [stream] = await attach.read_committed(*stored)
    return stream


async def render_response(stored: StoredResponse, stream: Stream) -> dict[str, Any]:
    """The response object with what is committed so far."""
    renderer = ResponseObjectRenderer(stored.answer, stream)
    return await offload(stream.num_records, renderer.render_so_far)


async def cancel_stored(stored: StoredResponse) -> Stream:
    """Cancel the request unless it has ended. Returns its stream, which has ended unless CANCEL_WAIT_S have
    passed. Raises ApiError (503).
    """
    stream = await read_response(stored)
    if stream.terminal:
        return stream
    async with asking_broker():
        await cancel_request(stored.pool.client, stored.answer.request_id)
    end_s = time.monotonic() + CANCEL_WAIT_S
    while True:
        stream = await read_response(stored)
        if stream.terminal or time.monotonic() > end_s:
            return stream
        await asyncio.sleep(CANCEL_POLL_S)


async def delete_response(stored: StoredResponse) -> None:
    """Cancel a response unless it has ended, then delete it. Raises ApiError (503)."""
    await cancel_stored(stored)
    async with asking_broker():
        if not await delete_ended(stored.pool.client, stored.answer.request_id):
            raise unavailable("the response was cancelled, but has not ended yet: delete it again")
