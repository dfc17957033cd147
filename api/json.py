"""JSON: the encoder of all responses and job answers."""

import json
from typing import Any

import orjson


def to_json(value: Any) -> bytes:
    """Compact JSON as bytes; a number that JSON cannot express (NaN, infinity) is null.

    A whole number beyond 64 bits, which a client's JSON schema may have, becomes the nearest float, as when
    it is read.
    """
    try:
        return orjson.dumps(value)
    except TypeError:
        return orjson.dumps(orjson.loads(json.dumps(value)))
