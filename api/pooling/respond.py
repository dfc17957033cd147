"""Respond: submits requests for vectors or scores, and responds over HTTP."""

from dataclasses import replace

from starlette.requests import Request
from starlette.responses import Response

from api.answers.answer import Rendering
from api.pooling.readers import Asked
from api.pooling.render import RENDERER
from api.requests.pool import Pool
from api.requests.respond import new_answer, submit_and_respond


async def respond(request: Request, pool: Pool, asked: Asked, priority: str | int | None = None) -> Response:
    """Submit the requests, and respond with their vectors or scores. Raises ApiError."""
    requests = asked.inputs.requests
    answer = new_answer(
        request,
        pool,
        requests=requests,
        prefixes=[""] * len(requests),
        rendering=Rendering(),
        priority=priority,
    )
    answer = replace(answer, vectors=asked.shown)
    return await submit_and_respond(request, pool, answer, asked.inputs.num_chars, RENDERER)
