"""Server-sent events: the frames of a token stream, its headers, and the comments between frames.

A frame is a function of the request as it was admitted (`HttpAnswer`) and of its tokens: no clock, no name of
a gateway, nothing of how tokens were grouped on their way. Frames come in one order, also those of several
choices, and each is one chunk of HTTP. So every gateway that renders an answer from its first token sends the
same bytes. Comments that keep the connection alive are the only bytes besides.
"""

from itertools import count

from api.event_loop.feed import Feed, MappedFeed
from common.messages.answer import HttpAnswer

COMMENT = b": \n\n"
"""A keep-alive comment between two frames of a stream: an event of its own, for clients that cut a stream at
its empty lines.
"""
COMMENT_AMONG_IDS = b": \n"
"""The same where frames have ids: behind the first of these the `openai` package reads an event without data
at every empty line.
"""
HEADERS = {"content-type": "text/event-stream", "cache-control": "no-cache", "x-accel-buffering": "no"}


def sse_frames(answer: HttpAnswer, bodies: Feed[bytes]) -> Feed[bytes]:
    """The frames of an answer; an id is a frame's ordinal, counted from 1."""
    if not answer.numbered:
        return MappedFeed(bodies, lambda body: b"data: %b\n\n" % body)
    ordinals = count(1)
    return MappedFeed(bodies, lambda body: b"id: %d\ndata: %b\n\n" % (next(ordinals), body))
