"""JSON: the encoder of all responses and of the answers to jobs."""

import json
from collections.abc import Iterable
from itertools import islice
from typing import Any

import orjson
from starlette.responses import Response

ITEMS_AT_ONCE = 1024


def to_json(value: Any) -> bytes:
    """Compact JSON as bytes; a number that JSON cannot express (NaN, infinity) is null.

    An integer beyond 64 bits becomes the nearest float, as when it is read; a client's JSON schema may have
    one.
    """
    try:
        return orjson.dumps(value)
    except TypeError:
        return orjson.dumps(orjson.loads(json.dumps(value)))


def fresh_json(content: Any) -> Response:
    """A response that is never cached."""
    return Response(to_json(content), 200, {"cache-control": "no-store"}, "application/json")


def list_to_json(items: Iterable[Any]) -> bytes:
    """JSON of a list; at most ITEMS_AT_ONCE of its items are in memory at a time."""
    left = iter(items)
    parts = iter(lambda: to_json([*islice(left, ITEMS_AT_ONCE)])[1:-1], b"")
    return b"[%b]" % b",".join(parts)
