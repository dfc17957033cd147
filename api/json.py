"""JSON: the encoder of all responses and job answers."""

import json
from collections.abc import Iterable
from itertools import islice
from typing import Any

import orjson

NUM_AT_ONCE = 1024


def to_json(value: Any) -> bytes:
    """Compact JSON as bytes; a number that JSON cannot express (NaN, infinity) is null.

    A whole number beyond 64 bits, which a client's JSON schema may have, becomes the nearest float, as when
    it is read.
    """
    try:
        return orjson.dumps(value)
    except TypeError:
        return orjson.dumps(orjson.loads(json.dumps(value)))


def list_to_json(items: Iterable[Any]) -> bytes:
    """A list, of which only a few items are there at once."""
    left = iter(items)
    parts = iter(lambda: to_json([*islice(left, NUM_AT_ONCE)])[1:-1], b"")
    return b"[%b]" % b",".join(parts)
