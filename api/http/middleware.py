"""Middlewares: what HTTP requests pass on their way to an application; here they get their ids, and their
arrival is counted.

A request id is in the header `x-request-id` of the response, in log lines and in Redis. If a client sends an
id, the response echoes that one; inside the fleet the request has the gateway's id.
"""

import logging
import uuid
from collections.abc import Awaitable, Callable
from functools import partial
from typing import cast

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.errors import anthropic
from api.event_loop import Turns
from api.protocols.protocol import ROW, Protocol, asks_for_tokens, errors_of
from common.ids import CLIENTS_REQUEST_ID
from common.process.logs import REQUEST_ID

log = logging.getLogger(__name__)

Middleware = Callable[[ASGIApp, Scope, Receive, Send], Awaitable[None]]
"""Handles an HTTP request by calling the application that it is given."""
REQUEST_ID_HEADER = "x-request-id"
STREAM_PATH = "/requests/{request_id}/stream"
"""Where a streamed answer goes on."""
ID_HEADERS = (REQUEST_ID_HEADER, "request-id")
"""Of responses; the second one has Anthropic's API alone."""
MAX_ARRIVALS = 4
"""Requests that begin in one turn of the event loop; each takes up to a millisecond until it waits for the
broker.
"""


def client_request_id(scope: Scope) -> str:
    """The id that the client sent; empty if it sent none, or one that cannot be echoed."""
    for name, value in scope["headers"]:
        if name == REQUEST_ID_HEADER.encode() and CLIENTS_REQUEST_ID.fullmatch(value):
            return cast(bytes, value).decode()
    return ""


def request_id(request: Request) -> str:
    """The request's id inside the fleet; choice n has this id and `.{n}`."""
    return cast(str, request.state.request_id)


def around(app: ASGIApp, *middlewares: Middleware) -> ASGIApp:
    """An application whose HTTP requests pass these middlewares, the outermost first."""
    served = app
    for middleware in reversed(middlewares):
        served = partial(middleware, served)

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        await (served if scope["type"] == "http" else app)(scope, receive, send)

    return serve


async def give_request_id(
    protocol_at: Callable[[str], Protocol | None],
    app: ASGIApp,
    scope: Scope,
    receive: Receive,
    send: Send,
) -> None:
    """Give a request an id and the row of its protocol, and its response the header."""
    state = scope["state"]
    state[ROW] = protocol_at(scope["path"])
    names = ID_HEADERS if errors_of(scope) is anthropic else ID_HEADERS[:1]
    ours, theirs = state.setdefault("request_id", uuid.uuid4().hex), client_request_id(scope)
    REQUEST_ID.set(ours)
    if theirs:
        log.info("request %s: its client calls it %s", ours, theirs)

    async def send_with_id(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name in names:
                headers[name] = theirs or ours
        await send(message)

    try:
        await app(scope, receive, send_with_id)
    except Exception as error:  # the server logs the traceback
        log.error("request %s crashed: %s", ours, type(error).__name__)
        raise


async def note_arrival(
    count_arrival: Callable[[], None],
    turns: Turns,
    app: ASGIApp,
    scope: Scope,
    receive: Receive,
    send: Send,
) -> None:
    """Count a request for tokens when it arrives, and let it wait for its turn if many arrive at once."""
    if asks_for_tokens(scope):
        count_arrival()
        await turns.wait_turn()
    await app(scope, receive, send)
