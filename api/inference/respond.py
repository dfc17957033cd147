"""Respond: describes an answer, submits its requests, and responds with a stream or with the whole."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from api.answer import describe_answer
from api.event_loop.feed import Feed
from api.http.request_id import request_id
from api.http.resume_terms import read_terms
from api.inference.headers import prompt_headers
from api.inference.metrics import ARRIVED_S
from api.inference.pool import Pool
from api.service.headers import on_terms
from api.streams.stream import Stream
from api.streams.token_stream import TokenStream
from api.streams.whole import RenderWhole, respond_with_whole
from common.messages.answer import HttpAnswer, Rendering
from common.messages.request import Generate


class AnswerRenderer(NamedTuple):
    """How the answers of an API are rendered.

    Attributes:
        frames: all frames of a stream, from the first one on; it is the only reader of the streams, which are
            those of all choices, in order.
        whole: the body of a whole answer.
    """

    frames: Callable[[HttpAnswer, Sequence[Stream]], Feed[bytes]]
    whole: RenderWhole


def new_answer(
    request: Request,
    pool: Pool,
    *,
    requests: Iterable[Generate],
    prefixes: Sequence[str],
    rendering: Rendering,
    streamed: bool = False,
    resume_s: float | None = None,
    detached: bool | None = None,
    priority: str | int | None = None,
    service_tier: str | None = None,
) -> HttpAnswer:
    """The answer to validated requests, on the terms that its client asks for. Raises ApiError (422).

    Args:
        prefixes: for each prompt, the text with which its choices begin.
        resume_s, detached, priority, service_tier: the fields of the body.
    """
    on_own_terms = on_terms(request, requests, pool.settings, priority, service_tier)
    own_id, model = request_id(request), pool.settings.model_name
    terms = read_terms(request, own_id, streamed, resume_s, detached)
    route = request.url.path
    return describe_answer(
        request_id=own_id,
        route=route,
        streamed=streamed,
        model=model,
        requests=on_own_terms,
        prefixes=prefixes,
        rendering=rendering,
        terms=terms,
    )


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
        return TokenStream(
            answer, frames=renderer.frames(answer, streams), streams=streams, headers=headers, release=release
        )
    return await respond_with_whole(
        request,
        answer,
        streams=streams,
        headers=headers,
        render=renderer.whole,
        arrived_s=ARRIVED_S.get(),
        release=release,
    )
