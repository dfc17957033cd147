"""Middlewares: what HTTP requests pass on their way to an application; here they get their ids, and their
arrival is counted. Exceptions of routes become error responses of the route's API family.

A request id is in the header `x-request-id` of the response, in log lines and in Redis. If a client sends an
id, the response echoes that one; inside the fleet the request has the gateway's id.
"""

import logging
import uuid
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.errors import ADMITTED, ApiError, Family, anthropic, cut, internal_error, invalid
from api.event_loop import Turns
from api.http.access_log import note_refusal
from api.json import to_json
from api.protocols.protocol import ROW, Protocol, asks_for_tokens, errors_of
from api.requests.service_terms import REQUEST_ID_HEADER, client_request_id
from common.process.logs import REQUEST_ID

log = logging.getLogger(__name__)

Middleware = Callable[[ASGIApp, Scope, Receive, Send], Awaitable[None]]
"""Handles an HTTP request by calling the application that it is given."""
STREAM_PATH = "/requests/{request_id}/stream"
"""Where a streamed answer goes on."""
ID_HEADERS = (REQUEST_ID_HEADER, "request-id")
"""Of responses; the second one has Anthropic's API alone."""
MAX_ARRIVALS = 4
"""Requests that begin in one turn of the event loop; each takes up to a millisecond until it waits for the
broker.
"""


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


# --- errors -------------------------------------------------------------------------------------------------


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
