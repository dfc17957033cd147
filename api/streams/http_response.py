"""HTTP responses of an answer: its tokens as they come (`TokenStream`), or all of it in one body.

Each has the answer's socket kept. It releases the streams when the kernel has all bytes or the client has
gone: then a request that has not ended is cancelled, unless another gateway goes on with it or its client may
come back.
"""

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from api.answers.answer import AnswerTerms, HttpAnswer
from api.errors import failed
from api.event_loop import offload
from api.handover.answer_socket import flush_socket, probe_client, socket_of
from api.http.middleware import STREAM_PATH, access_of, count_longest, end_answer, note_streams
from api.http.sse import (
    COMMENT,
    COMMENT_AMONG_IDS,
    SSE_HEADERS,
    UNREAD,
    Feed,
    FeedResponse,
    RestOfFeed,
    Unread,
    wait_for_disconnect,
)
from api.protocols.protocol import Renderer
from api.requests.metrics import total_headers
from api.streams.stream import Stream
from common.broker.keys import pool_of
from common.messages.kept_answer import MAX_ANSWER_BYTES, KeptRequests
from common.process.event_loop import run_until_one_ends

Release = Callable[[Stream, int, AnswerTerms], None]
"""(stream, number of its reader, how long it goes on without one and is kept): `Admission.release`."""

# --- socket and streams -------------------------------------------------------------------------------------


async def keep_socket(
    scope: Scope,
    answer: HttpAnswer,
    streams: Sequence[Stream],
    reader: int = 0,
    num_seen: int = 0,
    comment: bytes = b"",
    extra: Mapping[str, str] | None = None,
) -> None:
    """Have the socket of an answer kept, if a keeper listens, with what it takes to queue the requests again.
    The other arguments are those of `AnswerSocket.keep`.
    """
    if (answer_socket := socket_of(scope)) is None:
        return
    packed, channel = streams[0].answer, streams[0].request.channel
    digests = [stream.request.digest for stream in streams]
    requests = KeptRequests(pool_of(channel), channel, digests, packed, is_kept=answer.terms.kept_s > 0)
    fits = len(packed) + sum(map(len, digests)) <= MAX_ANSWER_BYTES  # in a datagram to the keeper
    kept = requests if fits else None
    await answer_socket.keep(answer.request_id, reader, num_seen, comment, extra, kept)


def release_all(
    scope: Scope, answer: HttpAnswer, streams: Sequence[Stream], release: Release, reader: int
) -> None:
    """Release the streams of an answer, and end its part of the trace and of the access log. Streams that
    another gateway goes on with are not cancelled.
    """
    answer_socket, terms = socket_of(scope), answer.terms
    goes_on = answer_socket is not None and answer_socket.is_handed_over
    end_answer(scope, answer, streams, reader, goes_on)
    if not goes_on:
        count_longest(streams)
    if (record := access_of(scope)) is not None:
        record.goes_on, record.route = goes_on, answer.route
        note_streams(record, answer.model, streams, "left" if terms.kept_s else "cancelled")
    for stream in streams:
        release(stream, reader, replace(terms, goes_on_s=math.inf) if goes_on else terms)


# --- tokens as they come ------------------------------------------------------------------------------------


class TokenStream(FeedResponse):
    """Response of `frames`, with keep-alive comments; `release` is called once for each stream.

    Attributes:
        reader: number of the reader of the answer, 0 for the first.
        num_seen: number of frames that the client has already.
    """

    def __init__(
        self,
        answer: HttpAnswer,
        *,
        frames: Feed[bytes],
        streams: Sequence[Stream],
        headers: Mapping[str, str],
        release: Release,
        reader: int = 0,
        num_seen: int = 0,
    ) -> None:
        place = {"content-location": STREAM_PATH.format(request_id=answer.request_id)}
        comment = COMMENT_AMONG_IDS if answer.numbered else COMMENT
        super().__init__(frames, comment, SSE_HEADERS | place | dict(headers) | {"connection": "keep-alive"})
        self.answer = answer
        self.streams = streams
        self.release = release
        self.reader = reader
        self.num_seen = num_seen

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        unread: Unread = scope["state"][UNREAD]
        unread.answer_id, unread.count_ended = self.answer.request_id, self.count_ended
        if (answer_socket := socket_of(scope)) is not None:
            self.may_comment = answer_socket.may_comment
        try:
            await keep_socket(scope, self.answer, self.streams, self.reader, self.num_seen, self.comment)
            await super().__call__(scope, receive, send)
            await flush_socket(scope)
        finally:
            unread.answer_id, unread.count_ended = "", None
            release_all(scope, self.answer, self.streams, self.release, self.reader)

    def count_ended(self) -> int:
        """Number of records of streams that have ended; they wait to be rendered."""
        return sum(stream.num_records for stream in self.streams if stream.terminal)


# --- an answer ----------------------------------------------------------------------------------------------


async def respond(
    request: Request,
    answer: HttpAnswer,
    *,
    renderer: type[Renderer],
    streams: Sequence[Stream],
    headers: Mapping[str, str],
    arrived_s: float,
    release: Release,
    reader: int = 0,
    num_seen: int = 0,
) -> Response:
    """Respond with the frames after the first `num_seen`; or wait until all choices have finished, and
    respond with the whole.

    Args:
        headers: those that are known already.
        release, reader: as in `release_all`.

    Raises:
        ApiError: the error of the first choice that failed.
        ClientDisconnect: the client has left.
    """
    if answer.streamed:
        frames = renderer(answer, streams).frames()
        return TokenStream(
            answer,
            frames=RestOfFeed(frames, num_seen) if num_seen else frames,
            streams=streams,
            headers=headers,
            release=release,
            reader=reader,
            num_seen=num_seen,
        )
    release_streams = partial(release_all, request.scope, answer, streams, release, reader)
    try:
        await keep_socket(request.scope, answer, streams, extra=headers)
        await wait_until_finished(streams, request)
        num_records = sum(stream.num_records for stream in streams)
        body, num_tokens = await offload(num_records, renderer(answer, streams).whole)
    except BaseException:
        release_streams()
        raise
    more_headers = total_headers(answer, streams, num_tokens, arrived_s)
    return WholeAnswer(body, {**headers, **more_headers}, release_streams)


class WholeAnswer(Response):
    """One JSON body; `release_streams` is called when the kernel has all of it, or the client has gone."""

    def __init__(self, body: bytes, headers: Mapping[str, str], release_streams: Callable[[], None]) -> None:
        super().__init__(body, 200, headers, "application/json")
        self.release_streams = release_streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
            await flush_socket(scope)
        finally:
            self.release_streams()


async def wait_until_finished(streams: Sequence[Stream], request: Request) -> None:
    """Wait until all streams have finished, or one has failed. Raises as `respond`."""
    await run_until_one_ends(all_finished(streams), client_gone(request))
    for stream in streams:
        if stream.terminal and not stream.finished:
            raise failed(stream.terminal)
    if not all(stream.finished for stream in streams):
        raise ClientDisconnect


async def client_gone(request: Request) -> None:
    """Return when the client of an answer that is not streamed has gone."""
    await wait_for_disconnect(request.scope, request.receive, partial(probe_client, request.scope))


async def all_finished(streams: Sequence[Stream]) -> None:
    """Return when all have finished, or the first one has failed."""
    ends = [asyncio.create_task(stream.ended.wait()) for stream in streams]
    try:
        while any(not stream.terminal for stream in streams):
            await asyncio.wait([end for end in ends if not end.done()], return_when=asyncio.FIRST_COMPLETED)
            if any(stream.terminal and not stream.finished for stream in streams):
                return
    finally:
        for end in ends:
            end.cancel()
