"""Respond: submits the requests of an answer, and responds with a stream or with the whole."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from api.http.headers import prompt_headers
from api.http.sse import TokenStream
from api.http.whole import RenderWhole, respond_with_whole
from api.inference.metrics import ARRIVED_S
from api.inference.pool import Pool
from api.streams.feed import Feed
from api.streams.stream import Stream
from common.messages.answer import HttpAnswer


class AnswerRenderer(NamedTuple):
    """How the answers of an API are rendered.

    Attributes:
        frames: all frames of a stream, from the first one on; it is the only reader of the streams, which are
            those of all choices, in order.
        whole: the body of a whole answer.
    """

    frames: Callable[[HttpAnswer, Sequence[Stream]], Feed[bytes]]
    whole: RenderWhole


async def submit_and_respond(
    request: Request, pool: Pool, answer: HttpAnswer, num_chars: int, renderer: AnswerRenderer
) -> Response:
    """Submit all requests of the answer, and respond. Raises ApiError.

    Args:
        num_chars: characters of all prompts.
    """
    streams = await pool.admission.submit_all(answer)
    headers, release = prompt_headers(pool.settings, num_chars), pool.admission.release
    if answer.streamed:
        return TokenStream(answer, renderer.frames(answer, streams), streams, headers, release)
    return await respond_with_whole(
        request, answer, streams, headers, renderer.whole, ARRIVED_S.get(), release
    )
