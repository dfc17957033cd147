"""Error handlers: turn exceptions of routes into error responses of the route's API family."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match

from api.errors import ADMITTED, ApiError, Family, cut, internal_error, invalid
from api.http.access_log import note_refusal
from api.json import to_json
from api.protocols.protocol import errors_of

CLIENT_CLOSED_REQUEST = 499
CountError = Callable[[int, str], None]
"""Counts an error response by its status and type."""
METHODS = ("DELETE", "GET", "HEAD", "PATCH", "POST", "PUT")


def error_response(error: ApiError, family: Family, headers: Mapping[str, str] | None = None) -> Response:
    """An error as the response of a route whose errors have this form."""
    status, body = family(error)
    all_headers = {**error.headers, **(headers or {})}
    if error.status == 401:
        all_headers["www-authenticate"] = "Bearer"
    if error.retry_after_s is not None:
        all_headers["retry-after"] = str(error.retry_after_s)
    if error.status in ADMITTED:
        # OpenAI's clients retry after a 408 or a 500. A request that kills workers must not come back, nor
        # one whose deadline has passed.
        all_headers["x-should-retry"] = "false"
    return Response(to_json(body), status, all_headers, "application/json")


async def handle_api_error(count: CountError, request: Request, error: ApiError) -> Response:
    count(error.status, error.error_type)
    note_refusal(request.scope, error.error_type)
    return error_response(error, errors_of(request.scope))


async def handle_query(count: CountError, request: Request, exception: RequestValidationError) -> Response:
    """Answer a request with a wrong query; routes read their bodies themselves."""
    problem = exception.errors()[0]
    name = str(problem["loc"][-1])
    return await handle_api_error(count, request, invalid(f"`{name}`: {problem['msg']}", name))


async def handle_http_exception(request: Request, exception: HTTPException) -> Response:
    """Answer a request whose path or method no route has."""
    status, error_type = exception.status_code, exception.detail.lower().replace(" ", "_")
    note_refusal(request.scope, error_type)
    path = request.url.path
    hint = request.app.state.hint(path) if status == 404 else ""
    asked = f"{cut(request.method)} {cut(path)}"
    error = ApiError(status, error_type, f"{exception.detail}: {asked}{hint}")
    headers = exception.headers
    if status == 405:  # of all routes with this path; Starlette names only those of the first one
        found = [
            (route.matches({**request.scope, "method": method})[0], method)
            for method in METHODS
            for route in request.app.routes
        ]
        headers = {
            "allow": ", ".join(dict.fromkeys(method for match, method in found if match is Match.FULL))
        }
    return error_response(error, errors_of(request.scope), headers)


async def handle_disconnect(request: Request, error: Exception) -> Response:
    """Answer a client that left before its request was complete; only middlewares see this response."""
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def handle_crash(request: Request, error: Exception) -> Response:
    """Answer 500. Starlette raises the error again, so the log has the traceback, and the connection ends."""
    return error_response(internal_error(), errors_of(request.scope), {"connection": "close"})


def error_handlers(count: CountError) -> dict[int | type[Exception], Any]:
    return {
        ApiError: partial(handle_api_error, count),
        HTTPException: handle_http_exception,
        RequestValidationError: partial(handle_query, count),
        ClientDisconnect: handle_disconnect,
        Exception: handle_crash,
    }
