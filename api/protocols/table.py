"""Table: the rows of all protocols. A route that makes answers is here, or it is none."""

from collections.abc import Awaitable, Callable, Iterator

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import compile_path

from api.protocols.clouds import INVOCATIONS, VERTEX
from api.protocols.kserve import KSERVE_GENERATE, KSERVE_GENERATE_STREAM, KSERVE_INFER
from api.protocols.messages import MESSAGES
from api.protocols.openai import CHAT_COMPLETIONS, COMPLETIONS
from api.protocols.pooling import EMBEDDINGS, RERANK, SCORE
from api.protocols.protocol import Protocol
from api.protocols.responses import RESPONSES
from api.protocols.serve import serve
from api.protocols.tgi import COMPAT_GENERATE, GENERATE, GENERATE_STREAM

PROTOCOLS = (
    *(GENERATE, GENERATE_STREAM, COMPAT_GENERATE, INVOCATIONS, VERTEX),
    *(KSERVE_GENERATE, KSERVE_GENERATE_STREAM, KSERVE_INFER),
    *(CHAT_COMPLETIONS, COMPLETIONS, RESPONSES, MESSAGES),
    *(EMBEDDINGS, RERANK, SCORE),
)


def paths() -> Iterator[tuple[str, Protocol]]:
    for row in PROTOCOLS:
        yield from ((path, row) for path in (*row.aliases, row.path))


BY_PATH = {path: row for path, row in paths() if "{" not in path}
BY_PATTERN = [(compile_path(path)[0], row) for path, row in paths() if "{" in path]
JOBS = {row.prompt[0]: row for row in PROTOCOLS if row.in_jobs}
"""The field of a job's prompt → the route of which it has the parameters, unless it names another one."""
BATCHES = tuple(row.path for row in PROTOCOLS if row.in_batches)


def protocol_at(path: str) -> Protocol | None:
    """The row of the route with this path."""
    if (row := BY_PATH.get(path)) is not None:
        return row
    return next((row for pattern, row in BY_PATTERN if pattern.match(path)), None)


def protocol_of(path: str) -> Protocol:
    """The row of a route that has made an answer."""
    row = protocol_at(path)
    assert row is not None, path
    return row


def endpoint(row: Protocol) -> Callable[[Request], Awaitable[Response]]:
    async def serve_row(request: Request) -> Response:
        return await serve(row, request)

    return serve_row


def make_router() -> APIRouter:
    """The routes of all rows, each path's own after its aliases: names of models may have slashes."""
    router = APIRouter()
    for path, row in paths():
        router.add_api_route(
            path,
            endpoint(row),
            methods=["POST"],
            name=row.name,
            include_in_schema=path == row.path,
            **row.docs,
        )
    return router
