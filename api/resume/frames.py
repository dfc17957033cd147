"""Frames of any answer, whichever route it was requested at."""

from collections.abc import Sequence

from api.errors import family_of, openai
from api.http.sse import sse_frames
from api.http.whole import Whole
from api.openai import respond
from api.openai.stream import stream_bodies as openai_bodies
from api.response_object.frames import ResponseFrames
from api.response_object.whole import render_whole as render_response
from api.streams.feed import Feed
from api.streams.stream import Stream
from api.tgi import best_of, vertex
from api.tgi.render import StreamBodies
from common.messages.answer import HttpAnswer


def begins_at_once(answer: HttpAnswer) -> bool:
    """Whether the first frames need no token."""
    return answer.response is not None


def render_whole(answer: HttpAnswer, streams: Sequence[Stream], arrived_s: float) -> Whole:
    """The body of a whole answer and the headers of its end; `arrived_s` is when it was requested."""
    if answer.response is not None:
        return render_response(answer, streams, arrived_s)
    if family_of(answer.route) is openai:
        return respond.render_whole(answer, streams, arrived_s)
    render = vertex.render_whole if answer.route == vertex.PATH else best_of.render_whole
    return render(answer, streams, arrived_s)


def render_frames(answer: HttpAnswer, streams: Sequence[Stream]) -> Feed[bytes]:
    """All frames of an answer, from the first one on.

    Args:
        streams: of all choices, in order; this is their only reader.
    """
    if answer.response is not None:
        return ResponseFrames(answer, streams)
    if family_of(answer.route) is openai:
        return sse_frames(answer, openai_bodies(respond.RENDERERS[answer.route](answer, streams)))
    [stream] = streams
    return sse_frames(answer, StreamBodies(stream, answer.prefix(0), answer.rendering.details))
