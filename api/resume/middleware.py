"""Resume middleware: a POST with `Last-Event-ID` goes on with the answer to an earlier one."""

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from api.errors import invalid
from api.http.error_handlers import error_response
from api.http.request_id import HEADER
from api.resume import attach

ROUTES = ("/", "/generate_stream", "/v1/chat/completions", "/v1/completions", "/v1/responses")


async def resume_posts(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """Send a POST with `Last-Event-ID` to `GET /requests/{x-request-id}/stream`. Its body is not read: it
    would be the earlier one again.
    """
    is_post = scope.get("method") == "POST" and scope["path"] in ROUTES
    headers = Headers(scope=scope) if is_post else Headers()
    if attach.HEADER not in headers:
        await app(scope, receive, send)
    elif HEADER not in headers:
        text = f"`{attach.HEADER}` needs the request's id in `{HEADER}`: see `content-location`"
        await error_response(invalid(text, attach.HEADER), scope["path"])(scope, receive, send)
    else:
        path = f"/requests/{headers[HEADER]}/stream"
        scope.update(method="GET", path=path, raw_path=path.encode())
        await app(scope, receive, send)
