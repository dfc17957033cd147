"""Request id: in the header `x-request-id` of every response, in log lines, and in Redis.

A client may send an id of its own, which is echoed to it; inside the fleet the request has the gateway's id.
"""

import re
from typing import cast

from starlette.requests import Request
from starlette.types import Scope

HEADER = "x-request-id"
ACCEPTED = re.compile(rb"[\x21-\x7e]{1,128}")


def client_request_id(scope: Scope) -> str:
    """The id that the client sent; empty if it sent none, or one that cannot be echoed."""
    for name, value in scope["headers"]:
        if name == HEADER.encode() and ACCEPTED.fullmatch(value):
            return cast(bytes, value).decode()
    return ""


def request_id(request: Request) -> str:
    """The request's id inside the fleet; its n-th choice adds `.{n}`."""
    return cast(str, request.state.request_id)
