"""Logits in responses: base64, beside their shape and dtype."""

from base64 import b64encode
from typing import Any

import orjson

from api.streams.stream import Stream

ENCODED_AT_ONCE = 3 * 2**16
"""Bytes encoded in one call, a multiple of 3: other threads wait for no longer."""
LOGITS = {"dtype": "float32", "shape": [2, 49152], "data": "AACAPw=="}
"""For /docs: little-endian values, a row for each token, a column for each id."""


def logits_fields(stream: Stream, num_tokens: int) -> dict[str, Any]:
    """The fields `context_logits` and `generation_logits` of a finished stream, those that were requested.

    Args:
        num_tokens: generated tokens that the response has.
    """
    logits, num_prompt = stream.request.logits, len(stream.prompt_ids)
    if logits is None:
        return {}
    rows = [("context_logits", 0, num_prompt)] if logits.context else []
    rows += [("generation_logits", num_prompt - 1, num_tokens)] if logits.generation else []
    values, fields = memoryview(stream.logits or b""), {}
    for name, position, count in rows:
        begin = (position - logits.first_position(num_prompt)) * logits.row_bytes
        own = values[begin : begin + count * logits.row_bytes]
        encoded = (b64encode(own[i : i + ENCODED_AT_ONCE]) for i in range(0, len(own), ENCODED_AT_ONCE))
        data = orjson.Fragment(b'"%b"' % b"".join(encoded))
        fields[name] = {"dtype": logits.dtype, "shape": (count, logits.vocab_size), "data": data}
    return fields
