"""Release: what happens to the streams of an answer when its response is over, and what keeps them longer."""

import math
from collections.abc import Callable, Mapping, Sequence

from starlette.types import Scope

from api.answer import keep_requests
from api.heir.answer_socket import is_handed_over, socket_of
from api.streams.stream import Stream
from common.messages.answer import HttpAnswer

Release = Callable[[Stream, int, float], None]
"""(stream, number of its reader, seconds for which it is kept): `Admission.release`."""


async def keep_socket(
    scope: Scope,
    answer: HttpAnswer,
    streams: Sequence[Stream],
    reader: int = 0,
    num_seen: int = 0,
    comment: bytes = b"",
    extra: Mapping[str, str] | None = None,
) -> None:
    """Have the socket of an answer kept, where a keeper listens, with what queues its requests again. The
    others are as in `AnswerSocket.keep`.
    """
    if (answer_socket := socket_of(scope)) is not None:
        admitted = [stream.request for stream in streams]
        requests = keep_requests(streams[0].answer, admitted, answer.terms.keep_s)
        await answer_socket.keep(answer.request_id, reader, num_seen, comment, extra, requests)


def release_all(
    scope: Scope, answer: HttpAnswer, streams: Sequence[Stream], release: Release, reader: int
) -> None:
    """Release the streams of an answer; those that another gateway goes on with are not cancelled."""
    for stream in streams:
        release(stream, reader, math.inf if is_handed_over(scope) else answer.terms.keep_s)
