"""The first step of OpenAI's routes: read the body, find the pool of its model, fill in its defaults."""

from collections.abc import Mapping
from typing import TypeVar

from starlette.requests import Request

from api.http import body
from api.http.state import pools_of
from api.inference.fields import SamplingFields
from api.inference.pool import Pool
from api.openai.shared_fields import OpenAIRequest

Shape = TypeVar("Shape", bound=OpenAIRequest)
SAMPLED = SamplingFields.model_fields


async def accept(request: Request, shape: type[Shape]) -> tuple[Pool, Shape]:
    """The pool that serves the body's model, and the body. Raises ApiError."""
    pools = pools_of(request)
    parsed = await body.read(request, shape, pools.own.settings.payload_limit)
    parsed.check()
    pool = await pools.find(parsed.model)
    return pool, fill_defaults(parsed, pool.tokenizer.sampling_defaults)


def fill_defaults(body: Shape, defaults: Mapping[str, float]) -> Shape:
    """The body with a model's defaults where it says nothing. As in vLLM, the default number of tokens is
    also the most that a request gets.
    """
    if not defaults:
        return body
    filled = {
        name: value for name, value in defaults.items() if name in SAMPLED and getattr(body, name) is None
    }
    if most := defaults.get("max_new_tokens"):
        lengths = {name: getattr(body, name, None) for name in ("max_tokens", "max_completion_tokens")}
        given = {name: min(length, most) for name, length in lengths.items() if length is not None}
        filled |= given or {"max_tokens": most}
    return body.model_copy(update=filled)
