"""The whole response in one body."""

from collections.abc import Sequence

from api.http.headers import time_headers
from api.http.whole import Whole
from api.json import to_json
from api.response_object.response import ResponsesRenderer
from api.streams.stream import Stream
from common.messages.answer import HttpAnswer


def render_whole(answer: HttpAnswer, streams: Sequence[Stream], arrived_s: float) -> Whole:
    """The body of a finished response, and TGI's headers of its end."""
    [stream] = streams
    renderer = ResponsesRenderer(answer, stream)
    body = to_json(renderer.render_so_far())
    usage = renderer.usage()
    totals = {
        "x-prompt-tokens": str(usage["input_tokens"]),
        "x-generated-tokens": str(usage["output_tokens"]),
    }
    return body, time_headers(stream, arrived_s) | totals
