"""The id of a request: in the header `x-request-id` of every answer, in log lines, and in Redis.

A client may bring its own, which is echoed; inside the fleet the request has ours all the same.
"""

import logging
import re
import uuid
from typing import cast

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.process.logs import REQUEST_ID

log = logging.getLogger(__name__)

HEADER = "x-request-id"
ACCEPTED = re.compile(rb"[\x21-\x7e]{1,128}")


class RequestIdMiddleware:
    """Around an application: gives every HTTP request an id, and every answer its header."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        ours, theirs = uuid.uuid4().hex, brought(scope)
        scope.setdefault("state", {}).update(request_id=ours, send=send)
        REQUEST_ID.set(ours)
        if theirs:
            log.info("request %s is %s to its client", ours, theirs)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER] = theirs or ours
            await send(message)

        try:
            await self.app(scope, receive, send_with_id)
        except Exception as error:  # the server logs the traceback
            log.error("request %s crashed: %s", ours, type(error).__name__)
            raise


def brought(scope: Scope) -> str:
    """The id that the client gave; empty where it gave none, or one that cannot be echoed."""
    for name, value in scope["headers"]:
        if name == HEADER.encode() and ACCEPTED.fullmatch(value):
            return cast(bytes, value).decode()
    return ""


def request_id(request: Request) -> str:
    """As the fleet knows the request; its n-th choice adds `.{n}`."""
    return cast(str, request.state.request_id)
