"""HTTP responses of an answer: its tokens as they come (`TokenStream`), or all of it in one body.

Each has the answer's socket kept. At its end the streams are released: then a request that has not ended is
cancelled, unless another gateway goes on with it or its client may come back.
"""

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from api.answers.answer import HttpAnswer
from api.errors import failed
from api.event_loop import offload
from api.handover.answer_socket import FORMAT, socket_of
from api.http.middleware import STREAM_PATH, count_longest, export_sent, record_of
from api.http.sse import (
    COMMENT,
    COMMENT_AMONG_IDS,
    CONNECTION,
    SSE_HEADERS,
    Feed,
    FeedResponse,
    RestOfFeed,
    wait_for_disconnect,
)
from api.protocols.protocol import Renderer
from api.requests.metrics import total_headers
from api.requests.pool import Pool
from api.streams.stream import Stream
from common.messages.kept_answer import MAX_ANSWER_BYTES, KeptAnswer, KeptRequests
from common.process.event_loop import run_until_one_ends


@dataclass(slots=True)
class Reader:
    """A connection that reads an answer.

    Attributes:
        number: of the reader of the answer, 0 for the first.
        num_seen: frames that the client has already.
        frames: those that it gets; None of an answer that is not streamed.
    """

    pool: Pool
    answer: HttpAnswer
    streams: Sequence[Stream]
    number: int = 0
    num_seen: int = 0
    frames: Feed | None = None

    def release(self, goes_on: bool = False) -> None:
        """Release the streams; those that another gateway goes on with are not cancelled."""
        terms = replace(self.answer.terms, goes_on_s=math.inf) if goes_on else self.answer.terms
        for stream in self.streams:
            self.pool.release(stream, self.number, terms)

    @property
    def num_records(self) -> int:
        """Number of log-probabilities of streams that have ended, and are not rendered yet."""
        if self.frames is not None and self.frames.ended:
            return 0
        return sum(stream.num_records for stream in self.streams if stream.terminal)


# --- socket and streams -------------------------------------------------------------------------------------


async def keep_socket(
    scope: Scope, reader: Reader, comment: bytes = b"", extra: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Have the socket of an answer kept, if a keeper listens, with what it takes to queue the requests again.

    Args:
        comment: what keeps the connection of a stream alive.
        extra: headers of a whole answer that another gateway does not know.
    """
    answer, streams = reader.answer, reader.streams
    packed, channel, pool = streams[0].answer, streams[0].request.channel, reader.pool.settings.pool
    digests = [stream.request.digest for stream in streams]
    requests = KeptRequests(pool, channel, digests, packed, is_kept=answer.terms.kept_s > 0)
    fits = len(packed) + sum(map(len, digests)) <= MAX_ANSWER_BYTES  # in a datagram to the keeper
    kept = KeptAnswer(answer.request_id, 0, FORMAT, reader.number, reader.num_seen, comment=comment)
    kept = replace(kept, extra=[*extra.items()], requests=requests if fits else None)
    await socket_of(scope).keep(kept)


def end_reading(scope: Scope, reader: Reader, is_only: bool) -> None:
    """Release an answer, and end its part of the trace and, if it is the only one, of the access log."""
    answer, streams, goes_on = reader.answer, reader.streams, socket_of(scope).is_handed_over
    scope["state"][CONNECTION].readers = ()
    export_sent(answer, streams, reader.number, goes_on)
    if not goes_on:
        count_longest(streams)
    if is_only:
        record = record_of(scope)
        record.goes_on, record.route = goes_on, answer.route
        record.note_streams(answer, streams, "left" if answer.terms.kept_s else "cancelled")
    reader.release(goes_on)


# --- tokens as they come ------------------------------------------------------------------------------------


class TokenStream(FeedResponse):
    """Response of the frames of an answer, with keep-alive comments; or of several, `merged`. Each is
    released at the end.

    No socket is kept for several: after the death of its gateway the client asks another one.
    """

    def __init__(
        self, readers: Sequence[Reader], headers: Mapping[str, str], merged: Feed | None = None
    ) -> None:
        frames, answer = merged or readers[0].frames, readers[0].answer
        assert frames is not None
        place = {} if merged else {"content-location": STREAM_PATH.format(request_id=answer.request_id)}
        comment = COMMENT_AMONG_IDS if answer.numbered else COMMENT
        super().__init__(frames, comment, SSE_HEADERS | place | dict(headers) | {"connection": "keep-alive"})
        self.readers = readers
        self.is_merged = merged is not None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["state"][CONNECTION].readers = self.readers
        self.may_comment = socket_of(scope).may_comment
        socket_of(scope).ends += [
            partial(end_reading, scope, reader, not self.is_merged) for reader in self.readers
        ]
        if not self.is_merged:
            await keep_socket(scope, self.readers[0], self.comment)
        await super().__call__(scope, receive, send)


# --- an answer ----------------------------------------------------------------------------------------------


async def respond(
    request: Request,
    reader: Reader,
    renderer: type[Renderer],
    headers: Mapping[str, str],
    arrived_s: float,
) -> Response:
    """Respond with the frames that the reader does not have; or wait until all choices have finished, and
    respond with the whole.

    Args:
        headers: those that are known already.

    Raises:
        ApiError: the error of the first choice that failed.
        ClientDisconnect: the client has left.
    """
    answer, streams = reader.answer, reader.streams
    if answer.streamed:
        frames = renderer(answer, streams).frames()
        reader.frames = RestOfFeed(frames, reader.num_seen) if reader.num_seen else frames
        return TokenStream([reader], headers)
    socket_of(request.scope).ends.append(partial(end_reading, request.scope, reader, True))
    await keep_socket(request.scope, reader, extra=headers)
    await run_until_one_ends(all_finished(streams), client_gone(request))
    body, more_headers = await render_whole(renderer(answer, streams), arrived_s)
    return Response(body, 200, {**headers, **more_headers}, "application/json")


async def render_whole(renderer: Renderer, arrived_s: float) -> tuple[bytes, dict[str, str]]:
    """The body of an answer that has finished, and its headers. `arrived_s` is the monotonic time of the
    request's arrival.
    """
    streams = renderer.streams
    body, num_tokens = await offload(sum(stream.num_records for stream in streams), renderer.whole)
    return body, total_headers(renderer.answer, streams, num_tokens, arrived_s)


async def client_gone(request: Request) -> None:
    """Wait until the client of an answer that is not streamed has gone. Raises ClientDisconnect."""
    await wait_for_disconnect(request.scope, request.receive, socket_of(request.scope).probe)
    raise ClientDisconnect


async def all_finished(streams: Sequence[Stream]) -> None:
    """Return when all have finished. Raises ApiError when one has failed."""
    ends = {asyncio.create_task(stream.ended.wait()): stream for stream in streams}
    try:
        while ends:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            for stream in [ends.pop(end) for end in [*ends] if end.done()]:
                if stream.terminal and not stream.finished:
                    raise failed(stream.terminal)
    finally:
        for end in ends:
            end.cancel()
