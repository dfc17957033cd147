"""Stored responses: found by id and key, read with their tokens, deleted."""

import re
from typing import Any

import orjson
from starlette.requests import Request

from api.event_loop.offload import offload
from api.response_object.items import Item
from api.response_object.response import ResponseObjectRenderer
from api.resume import attach
from api.resume.admitted import Admitted, find_own
from api.streams.stream import Stream

RESPONSE_ID = re.compile(r"resp_([0-9a-f]{32})")


class StoredResponse(Admitted):
    """A stored response, which may not have ended yet."""

    @property
    def input(self) -> list[Item]:
        """The conversation in front of the response, then its own input items."""
        assert self.answer.response is not None
        return [*orjson.loads(self.answer.response.before), *orjson.loads(self.answer.response.items)]


async def find_response(request: Request, response_id: str) -> StoredResponse | None:
    """The response of the client with this request; None if there is none. Raises ApiError (503)."""
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
