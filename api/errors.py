"""What a client is told when a request cannot be served: a status and an error object, each in the way of the
API that it speaks.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match

from api.inference import metrics
from api.json import to_json
from common.broker.client import CONNECT_TIMEOUT_S, ERRORS, describe_error
from common.messages.events import Terminal

CLIENT_GONE = 499
METHODS = ("DELETE", "GET", "HEAD", "PATCH", "POST", "PUT")


class ApiError(Exception):
    """A request that is not served, and why.

    Attributes:
        status, error_type: as on TGI's routes; OpenAI's follow from them.
        text: what a person reads.
        param: the field at fault, as the client wrote it.
        code: OpenAI's word for the cause, where its clients look for one.
    """

    def __init__(
        self, status: int, error_type: str, text: str, param: str | None = None, code: str | None = None
    ) -> None:
        self.status, self.error_type, self.text, self.param, self.code = status, error_type, text, param, code
        super().__init__(text)


# --- the two families ---------------------------------------------------------------------------------------

Family = Callable[[ApiError], tuple[int, dict[str, Any]]]
"""Status and error object of a refusal, as the clients of one API expect them."""

PREFIXES = {
    "validation": "Input validation error: ",
    "template_error": "Template error: ",
    "tool_error": "Tool error: ",
}
OPENAI_STATUS = {422: 400, 424: 500}
OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_exceeded"}
OPENAI_CODES = {401: "invalid_api_key", 429: "rate_limit_exceeded"}


def tgi(error: ApiError) -> tuple[int, dict[str, Any]]:
    return error.status, {
        "error": PREFIXES.get(error.error_type, "") + error.text,
        "error_type": error.error_type,
    }


def openai(error: ApiError) -> tuple[int, dict[str, Any]]:
    status = OPENAI_STATUS.get(error.status, error.status)
    kind = OPENAI_TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    code = error.code or OPENAI_CODES.get(status)
    return status, {"error": {"message": error.text, "type": kind, "param": error.param, "code": code}}


def family(path: str) -> Family:
    """Of the route with this path."""
    return openai if path == "/v1" or path.startswith("/v1/") else tgi


def respond(error: ApiError, path: str, headers: Mapping[str, str] | None = None) -> Response:
    """The refusal as an answer of the route with this path."""
    status, body = family(path)(error)
    known = dict(headers or {})
    if error.status == 401:
        known["www-authenticate"] = "Bearer"
    if error.status == 424:
        known["x-should-retry"] = (
            # OpenAI's clients repeat what ended with 500: a request that kills workers must not come back
            "false"
        )
    return Response(to_json(body), status, known, "application/json")


# --- causes -------------------------------------------------------------------------------------------------


def invalid(detail: str, param: str | None = None) -> ApiError:
    return ApiError(422, "validation", detail, param)


def unauthorised() -> ApiError:
    return ApiError(
        401, "unauthorized", "Incorrect API key: expected the header `Authorization: Bearer <key>`"
    )


def overloaded() -> ApiError:
    return ApiError(429, "overloaded", "Model is overloaded")


def conflict(what: str) -> ApiError:
    return ApiError(409, "conflict", f"another {what} has this id")


def unavailable(why: str) -> ApiError:
    return ApiError(503, "unavailable", f"Service unavailable: {why}")


@contextlib.asynccontextmanager
async def asking_broker() -> AsyncIterator[None]:
    """Around a client's questions to the broker. Raises ApiError (503) where it refuses, or does not answer in
    time.
    """
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            yield
    except ERRORS as error:
        raise unavailable(describe_error(error)) from error


def failed(terminal: Terminal) -> ApiError:
    """For a request that was admitted and did not end well."""
    why = terminal.error or f"the request was {terminal.reason}"
    return ApiError(424, terminal.error_type or "generation", f"Request failed during generation: {why}")


# --- handlers -----------------------------------------------------------------------------------------------


async def handle_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    metrics.refused(error.status, error.error_type)
    return respond(error, request.url.path)


async def handle_http_error(request: Request, exception: Exception) -> Response:
    """No such route, or not with this method."""
    assert isinstance(exception, HTTPException)
    status, error_type = exception.status_code, exception.detail.lower().replace(" ", "_")
    error = ApiError(status, error_type, f"{exception.detail}: {request.method} {request.url.path}")
    headers = {"allow": allowed(request)} if status == 405 else exception.headers
    return respond(error, request.url.path, headers)


def allowed(request: Request) -> str:
    """The methods of a path, of whichever route; Starlette names those of the first one."""
    routes = request.app.routes
    return ", ".join(
        one
        for one in METHODS
        if any(route.matches({**request.scope, "method": one})[0] is Match.FULL for route in routes)
    )


async def handle_disconnect(request: Request, error: Exception) -> Response:
    """The client was gone before its request was complete."""
    return Response(status_code=CLIENT_GONE)


async def handle_crash(request: Request, error: Exception) -> Response:
    """The log has the traceback: Starlette raises the error again."""
    return respond(ApiError(500, "internal", "Internal error"), request.url.path)
