"""JSON: the encoder of all responses and job answers."""

import orjson

to_json = orjson.dumps
"""Compact JSON as bytes; a number that JSON cannot express (NaN, infinity) is null."""
