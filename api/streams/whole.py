"""Whole answers: the response that has all of an answer in one body, unless its client leaves before.

Release: what happens to the streams of an answer when its response is over, and what keeps them longer.
"""

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from api.errors import failed
from api.event_loop import offload
from api.handover.answer_socket import flush_socket, is_handed_over, socket_of
from api.http.unread import is_half_closed
from api.streams.answer import keep_requests
from api.streams.stream import Stream
from common.messages.answer import HttpAnswer
from common.process.event_loop import run_until_one_ends

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


Whole = tuple[bytes, dict[str, str]]
"""A body, and the headers that are known with it."""
RenderWhole = Callable[[HttpAnswer, Sequence[Stream], float], Whole]
"""Renders (answer, finished streams of all choices, monotonic time of the request's arrival)."""


async def respond_with_whole(
    request: Request,
    answer: HttpAnswer,
    *,
    streams: Sequence[Stream],
    headers: Mapping[str, str],
    render: RenderWhole,
    arrived_s: float,
    release: Release,
    reader: int = 0,
) -> Response:
    """Wait until all choices have finished, and respond with what `render` makes of them.

    Args:
        headers: those that are known already.
        release, reader: as in `release_all`.

    Raises:
        ApiError: the error of the first choice that failed.
        ClientDisconnect: the client has left.
    """
    release_streams = partial(release_all, request.scope, answer, streams, release, reader)
    try:
        await keep_socket(request.scope, answer, streams, extra=headers)
        await wait_until_finished(streams, request)
        num_records = sum(stream.num_records for stream in streams)
        body, more_headers = await offload(num_records, partial(render, answer, streams, arrived_s))
    except BaseException:
        release_streams()
        raise
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


# --- waiting ------------------------------------------------------------------------------------------------


async def wait_until_finished(streams: Sequence[Stream], request: Request) -> None:
    """Wait until all streams have finished, or one has failed.

    Raises:
        ApiError: the error of the first stream that failed.
        ClientDisconnect: the client has left.
    """
    await run_until_one_ends(all_finished(streams), wait_for_disconnect(request))
    for stream in streams:
        if stream.terminal and not stream.finished:
            raise failed(stream.terminal)
    if not all(stream.finished for stream in streams):
        raise ClientDisconnect


async def all_finished(streams: Sequence[Stream]) -> None:
    """Return when all have finished, or at the first that has failed."""
    ends = [asyncio.create_task(stream.ended.wait()) for stream in streams]
    try:
        while any(not stream.terminal for stream in streams):
            await asyncio.wait([end for end in ends if not end.done()], return_when=asyncio.FIRST_COMPLETED)
            if any(stream.terminal and not stream.finished for stream in streams):
                return
    finally:
        for end in ends:
            end.cancel()


async def wait_for_disconnect(request: Request) -> None:
    """Return when the client has gone. One that sends no more may still read, so it is tried."""
    answer_socket = socket_of(request.scope)
    is_connected = True
    while is_connected:
        # it may have sent its last byte long ago: looked at before each wait, so that no wake-up is missed
        if answer_socket is not None and is_half_closed(request.scope):
            answer_socket.probe()
        is_connected = (await request.receive())["type"] != "http.disconnect"
