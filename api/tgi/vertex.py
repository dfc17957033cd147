"""Predictions: what /vertex answers, the texts of several prompts."""

from collections.abc import Sequence

from api.http.headers import time_headers
from api.http.whole import Whole
from api.json import to_json
from api.streams.stream import Stream
from common.messages.answer import HttpAnswer

PATH = "/vertex"


def render_whole(answer: HttpAnswer, streams: Sequence[Stream], arrived_s: float) -> Whole:
    """The body of a whole answer and the headers of its end; `arrived_s` is when it was requested."""
    last = max(streams, key=lambda stream: stream.ended_s)
    totals = {
        "x-prompt-tokens": str(answer.num_prompt_tokens),
        "x-generated-tokens": str(sum(stream.num_tokens for stream in streams)),
    }
    body = to_json({"predictions": [stream.text for stream in streams]})
    return body, time_headers(last, arrived_s) | totals
