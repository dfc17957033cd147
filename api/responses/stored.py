"""Stored responses: found by id and key, read with their tokens, deleted."""

import re
from typing import Any

import orjson
from starlette.requests import Request

from api.errors import ApiError
from api.event_loop.offload import offload
from api.response_object.items import Item
from api.response_object.response import ResponsesRenderer
from api.resume import attach
from api.resume.admitted import Admitted, find_own
from api.streams.stream import Stream

RESPONSE_ID = re.compile(r"resp_([0-9a-f]{32})")


class StoredResponse(Admitted):
    """A stored response, which may not have ended yet."""

    @property
    def before(self) -> list[Item]:
        """The conversation in front of its own items."""
        return read_items(self.answer.response.before if self.answer.response else b"[]")

    @property
    def items(self) -> list[Item]:
        """Its own input items."""
        return read_items(self.answer.response.items if self.answer.response else b"[]")

    @property
    def is_background(self) -> bool:
        return self.answer.terms.detached


def read_items(data: bytes) -> list[Item]:
    items: list[Item] = orjson.loads(data)
    return items


def not_found(response_id: str) -> ApiError:
    return ApiError(404, "not_found", f"Response with id '{response_id[:80]}' not found.")


async def find_response(request: Request, response_id: str) -> StoredResponse:
    """The response of the client with this request. Raises ApiError: 404, 503."""
    matched = RESPONSE_ID.fullmatch(response_id)
    if matched is None:
        raise not_found(response_id)
    admitted = await find_own(request, matched[1])
    if admitted is None or admitted.answer.response is None or not admitted.answer.terms.stored_ms:
        raise not_found(response_id)
    return StoredResponse(*admitted)


async def read_response(stored: StoredResponse) -> Stream:
    """The response's stream, with what is committed so far. Raises ApiError (503)."""
    [stream] = await attach.read_committed(*stored)
    return stream


async def render_response(stored: StoredResponse, stream: Stream) -> dict[str, Any]:
    """The response object with what is committed so far."""
    renderer = ResponsesRenderer(stored.answer, stream)
    return await offload(stream.num_records, renderer.render_so_far)
