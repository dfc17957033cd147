"""The first step of OpenAI's routes: read the body, and find the pool of its model."""

from typing import TypeVar

from starlette.requests import Request

from api.http import body
from api.http.state import pools_of
from api.inference.pool import Pool
from api.openai.shared_fields import OpenAIRequest

Shape = TypeVar("Shape", bound=OpenAIRequest)


async def accept(request: Request, shape: type[Shape]) -> tuple[Pool, Shape]:
    """The pool that serves the body's model, and the body. Raises ApiError."""
    pools = pools_of(request)
    parsed = await body.read(request, shape, pools.own.settings.payload_limit)
    parsed.check()
    return await pools.find(parsed.model), parsed
