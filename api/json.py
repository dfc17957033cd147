"""JSON: how the gateway writes it."""

import orjson

to_json = orjson.dumps
"""Compact JSON, as in every answer; a number that JSON cannot express is null."""
