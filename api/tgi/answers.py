"""Answers of TGI's routes, as they are sent: in frames, as a whole text, or as the predictions of /vertex."""

from collections.abc import Sequence

from api.event_loop.feed import Feed
from api.http.sse import sse_frames
from api.inference.headers import time_headers, total_headers
from api.inference.respond import AnswerRenderer
from api.json import to_json
from api.streams.stream import Stream
from api.streams.whole import Whole
from api.tgi.best_of import rank_by_logprob
from api.tgi.render import StreamBodies, render_response
from common.messages.answer import HttpAnswer

VERTEX = "/vertex"


def render_frames(answer: HttpAnswer, streams: Sequence[Stream]) -> Feed[bytes]:
    [stream] = streams
    return sse_frames(answer, StreamBodies(stream, answer.prefix(0), answer.rendering.details))


def render_whole(answer: HttpAnswer, streams: Sequence[Stream], arrived_s: float) -> Whole:
    if answer.route == VERTEX:
        body = to_json({"predictions": [stream.text for stream in streams]})
        num_generated = sum(stream.num_tokens for stream in streams)
        return body, total_headers(answer, streams, num_generated, arrived_s)
    best, *others = rank_by_logprob(streams)
    response = render_response(best, others, answer.prefix(0), answer.rendering.details)
    return to_json([response] if answer.route == "/" else response), time_headers(best, arrived_s)


RENDERER = AnswerRenderer(render_frames, render_whole)
