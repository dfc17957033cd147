"""Frames of any answer, whichever route it was requested at."""

from collections.abc import AsyncIterator, Sequence

from api.errors import family_of, openai
from api.http.sse import number_frames
from api.inference.stream import Stream
from api.openai.respond import RENDERERS
from api.openai.stream import stream_bodies as openai_bodies
from api.tgi.render import stream_bodies as tgi_bodies
from common.messages.answer import HttpAnswer


def render_frames(answer: HttpAnswer, streams: Sequence[Stream]) -> AsyncIterator[list[bytes]]:
    """Yields all frames of an answer, from the first one on, as soon as they are ready.

    Args:
        streams: of all choices, in order; this is their only reader.
    """
    if family_of(answer.route) is openai:
        return number_frames(openai_bodies(RENDERERS[answer.route](answer, streams)))
    [stream] = streams
    return number_frames(tgi_bodies(stream, answer.prefix(0), answer.rendering.details))
