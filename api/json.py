"""JSON: how what comes in is read, and the encoder of all responses and of the answers to jobs."""

import json
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import orjson
from pydantic_core import from_json
from starlette.responses import Response

from api.errors import invalid, quoted

ITEMS_AT_ONCE = 1024
MAX_JSON_DEPTH = 201
"""How deep lists and objects of all that comes in may be nested: pydantic's own limit. orjson reads 1024
levels and writes 254.
"""


class TooDeep(ValueError):
    """JSON that is nested deeper than MAX_JSON_DEPTH."""

    def __init__(self) -> None:
        super().__init__(f"it is nested more than {MAX_JSON_DEPTH} levels deep")


def parse_text(text: str) -> Any:
    """The value of JSON in a client's text. Raises ValueError, also for what could not be written: half a
    surrogate pair, and more than MAX_JSON_DEPTH levels.
    """
    try:
        return from_json(text)
    except ValueError as error:
        raise TooDeep if is_depth_error(str(error)) else error from None


def parse_bytes(data: bytes) -> Any:
    """The value of a client's JSON; an integer beyond 64 bits becomes the nearest float. Raises ValueError as
    `parse_text`.
    """
    value = orjson.loads(data)
    if is_too_deep(data):
        raise TooDeep
    return value


def is_too_deep(data: bytes) -> bool:
    if data.count(b"[") + data.count(b"{") <= MAX_JSON_DEPTH:
        return False
    try:
        from_json(data)
    except ValueError as error:
        return is_depth_error(str(error))
    return False


def is_depth_error(words: str) -> bool:
    """Whether pydantic says that JSON is nested too deeply."""
    return "recursion limit exceeded" in words


def to_json(value: Any) -> bytes:
    """Compact JSON as bytes; a number that JSON cannot express (NaN, infinity) is null.

    An integer beyond 64 bits becomes the nearest float, as when it is read; a client's JSON schema may have
    one.
    """
    try:
        return orjson.dumps(value)
    except TypeError:
        return orjson.dumps(orjson.loads(json.dumps(value)))


def json_response(content: Any) -> Response:
    return Response(to_json(content), media_type="application/json")


def fresh_json(content: Any) -> Response:
    """A response that is never cached."""
    return Response(to_json(content), 200, {"cache-control": "no-store"}, "application/json")


def list_object(items: Sequence[dict[str, Any]], limit: int) -> dict[str, Any]:
    """OpenAI's page of the first items of a list."""
    shown = items[:limit]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(items) > limit,
    }


def place_of(ids: Sequence[str], given: str | None, name: str) -> int:
    """The place of an id in a list, -1 for none or "". Raises ApiError (422) for another one.

    Args:
        name: of the parameter that has it.
    """
    if not given:
        return -1
    if given not in ids:
        raise invalid(f"`{name}` must be an id of the list. Given: {quoted(given)}")
    return ids.index(given)


def list_to_json(items: Iterable[Any]) -> bytes:
    """JSON of a list; at most ITEMS_AT_ONCE of its items are in memory at a time."""
    left = iter(items)
    parts = iter(lambda: to_json([*islice(left, ITEMS_AT_ONCE)])[1:-1], b"")
    return b"[%b]" % b",".join(parts)
