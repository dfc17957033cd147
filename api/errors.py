"""What a client is told when a request cannot be served: a status and TGI's object {"error", "error_type"}."""

import logging
from collections.abc import Mapping

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from common.messages import Terminal

log = logging.getLogger(__name__)

CLIENT_GONE = 499

encode = orjson.dumps
"""Compact JSON, as in every answer; a number that JSON has no word for is null."""


class Refusal(Exception):
    """A request that is not served, and why; `str()` is the text that the client sees."""

    def __init__(self, status: int, error_type: str, text: str) -> None:
        self.status, self.error_type, self.text = status, error_type, text
        super().__init__(text)

    @property
    def body(self) -> bytes:
        return encode({"error": self.text, "error_type": self.error_type})

    def response(self, headers: Mapping[str, str] | None = None) -> Response:
        return Response(self.body, self.status, headers, "application/json")


def invalid(detail: str) -> Refusal:
    return Refusal(422, "validation", f"Input validation error: {detail}")


def overloaded() -> Refusal:
    return Refusal(429, "overloaded", "Model is overloaded")


def unavailable(cause: str) -> Refusal:
    return Refusal(503, "unavailable", f"Service unavailable: {cause}")


def failed(terminal: Terminal) -> Refusal:
    """For a request that was admitted and did not end well."""
    cause = terminal.error or f"the request was {terminal.reason}"
    return Refusal(424, terminal.error_type or "generation", f"Request failed during generation: {cause}")


async def answer_refusal(request: Request, refusal: Exception) -> Response:
    assert isinstance(refusal, Refusal)
    return refusal.response()


async def answer_http(request: Request, error: Exception) -> Response:
    """No such route, or not with this method."""
    assert isinstance(error, HTTPException)
    error_type = error.detail.lower().replace(" ", "_")
    return Refusal(error.status_code, error_type, f"{error.detail}: {request.method} {request.url.path}").response(error.headers)


async def answer_nobody(request: Request, error: Exception) -> Response:
    """The client was gone before its request was complete."""
    return Response(status_code=CLIENT_GONE)


async def answer_crash(request: Request, error: Exception) -> Response:
    """The log has the traceback: Starlette raises the error again."""
    return Refusal(500, "internal", "Internal error").response()
