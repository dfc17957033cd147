"""Middlewares: ASGI applications around the routes; they give requests their ids and count their arrival."""

import logging
import uuid

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.event_loop.pace import Turns
from api.http.request_id import HEADER, client_request_id
from api.inference.metrics import count_arrival
from common.process.logs import REQUEST_ID

log = logging.getLogger(__name__)

MAX_ARRIVALS = 4
"""Each takes up to a millisecond until it waits for the broker."""
COUNTED_ROUTES = (
    "/",
    "/generate",
    "/generate_stream",
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/invocations",
    "/vertex",
)


class RequestIdMiddleware:
    """Gives every HTTP request an id, and every response its header."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        ours, theirs = state.setdefault("request_id", uuid.uuid4().hex), client_request_id(scope)
        REQUEST_ID.set(ours)
        if theirs:
            log.info("request %s: its client calls it %s", ours, theirs)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER] = theirs or ours
            await send(message)

        try:
            await self.app(scope, receive, send_with_id)
        except Exception as error:  # the server logs the traceback
            log.error("request %s crashed: %s", ours, type(error).__name__)
            raise


class ArrivalMiddleware:
    """Notes when a request for tokens arrives; of many that arrive at once, only some begin in one turn of
    the event loop.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self.turns = Turns(MAX_ARRIVALS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in COUNTED_ROUTES:
            count_arrival()
            await self.turns.take()
        await self.app(scope, receive, send)
