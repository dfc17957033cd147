"""POST /invocations: what SageMaker sends, as in TGI and vLLM."""

from collections.abc import Awaitable, Callable

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message

from api.http import body
from api.http.openapi import TGI
from api.inference.pool_registry import own_pool
from api.openai.routes_chat import chat_completions
from api.openai.routes_completions import completions
from api.service.headers import generation_body
from api.tgi.request_schemas import CompatGenerateRequest
from api.tgi.response_schemas import GENERATE_ERRORS, GenerateResponse
from api.tgi.routes_generate import EVENTS, EXAMPLE, compat_generate

router = APIRouter(responses=GENERATE_ERRORS, tags=[TGI])
Route = Callable[[Request], Awaitable[Response]]
ROUTES: dict[str, tuple[str, Route]] = {
    "inputs": ("/", compat_generate),
    "messages": ("/v1/chat/completions", chat_completions),
    "prompt": ("/v1/completions", completions),
}
"""The field by which a body is known → the route that it is meant for."""


@router.post(
    "/invocations",
    summary="Generate as another route does",
    openapi_extra=generation_body(CompatGenerateRequest, EXAMPLE),
    responses={200: {"model": list[GenerateResponse], **EVENTS[200]}},
)
async def invocations(request: Request) -> Response:
    """A body with `inputs` is answered as by `/`, one with `messages` as by `/v1/chat/completions`, one with
    `prompt` as by `/v1/completions`. Errors are TGI's.
    """
    data = await body.read_json(request, own_pool(request).settings.payload_limit)
    names = await body.names_in(data)
    path, route = next((ROUTES[name] for name in ROUTES if name in names), ROUTES["inputs"])
    return await route(readdressed(request, path, data))


def readdressed(request: Request, path: str, data: bytes) -> Request:
    """A request at another path; its body, which was read, comes again."""
    unread: list[Message] = [{"type": "http.request", "body": data, "more_body": False}]

    async def receive() -> Message:
        return unread.pop() if unread else await request.receive()

    return Request({**request.scope, "path": path, "raw_path": path.encode()}, receive)
