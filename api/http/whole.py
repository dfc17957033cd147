"""Whole answers: the response that has all of an answer in one body."""

from collections.abc import Callable, Mapping, Sequence

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from api.answer import keep_requests
from api.event_loop.offload import offload
from api.heir.answer_socket import flush_socket, socket_of
from api.http.disconnect import wait_until_finished
from api.http.release import Release, release_all
from api.streams.stream import Stream

Whole = tuple[bytes, dict[str, str]]
"""A body, and the headers that are known with it."""


async def respond_with_whole(
    request: Request,
    request_id: str,
    streams: Sequence[Stream],
    headers: Mapping[str, str],
    render: Callable[[], Whole],
    release: Release,
    reader: int = 0,
    keep_s: float = 0.0,
) -> Response:
    """Wait until all choices have finished, and respond with what `render` makes of them.

    Args:
        headers: those that are known already.
        release, reader, keep_s: as in `release_all`.

    Raises:
        ApiError: the error of the first choice that failed.
        ClientDisconnect: the client has left.
    """

    def let_go() -> None:
        release_all(request.scope, streams, release, reader, keep_s)

    try:
        if (answer_socket := socket_of(request.scope)) is not None:
            admitted = [stream.request for stream in streams]
            requests = keep_requests(streams[0].answer, admitted, keep_s)
            await answer_socket.keep(request_id, extra=headers, requests=requests)
        await wait_until_finished(streams, request)
        body, more_headers = await offload(sum(stream.num_records for stream in streams), render)
    except BaseException:
        let_go()
        raise
    return WholeAnswer(body, {**headers, **more_headers}, let_go)


class WholeAnswer(Response):
    """One JSON body; `let_go` is called when the kernel has all of it, or the client has gone."""

    def __init__(self, body: bytes, headers: Mapping[str, str], let_go: Callable[[], None]) -> None:
        super().__init__(body, 200, headers, "application/json")
        self.let_go = let_go

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
            await flush_socket(scope)
        finally:
            self.let_go()
