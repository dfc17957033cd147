"""The last step of OpenAI's routes: submit the requests, and respond with a stream or with the whole."""

from collections.abc import Sequence
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from api.answer import describe_answer
from api.errors import invalid
from api.http.headers import prompt_headers, time_headers
from api.http.request_id import request_id
from api.http.resume_terms import read_terms
from api.http.sse import TokenStream, sse_frames
from api.http.whole import Whole, respond_with_whole
from api.inference.pool import Pool
from api.openai.render import ResponseRenderer
from api.openai.render_chat import ChatCompletionRenderer
from api.openai.render_completion import CompletionRenderer
from api.openai.shared_fields import OpenAIRequest
from api.openai.stream import stream_bodies
from api.service.headers import on_terms
from api.streams.stream import Stream
from common.messages.answer import HttpAnswer, Rendering
from common.messages.request import Generate

RENDERERS: dict[str, type[ResponseRenderer]] = {
    "/v1/chat/completions": ChatCompletionRenderer,
    "/v1/completions": CompletionRenderer,
}
"""Renderers by route."""


async def respond(
    request: Request,
    pool: Pool,
    body: OpenAIRequest,
    requests: list[Generate],
    num_chars: int,
    prefixes: Sequence[str],
    rendering: Rendering,
    arrived_s: float,
) -> Response:
    """Submit all `requests`, and respond with a stream or with the whole. Raises ApiError.

    Args:
        num_chars: characters of all prompts.
        prefixes: for each prompt, the text that its choices begin with.
    """
    settings, admission = pool.settings, pool.admission
    if len(requests) > settings.max_concurrent_requests:
        raise invalid(
            f"`n` asks for {len(requests)} choices of all prompts: MAX_CONCURRENT_REQUESTS is "
            f"{settings.max_concurrent_requests}",
            "n",
        )
    requests = on_terms(request, requests, settings, body.priority, body.service_tier)
    route, own_id, streamed = request.url.path, request_id(request), bool(body.stream)
    terms = read_terms(request, own_id, streamed, body.resume_s, body.detached)
    answer = describe_answer(
        own_id, route, streamed, settings.model_name, requests, prefixes, rendering, terms
    )
    streams = await admission.submit_all(answer)
    headers = prompt_headers(settings, num_chars)
    if streamed:
        frames = sse_frames(answer, stream_bodies(RENDERERS[route](answer, streams)))
        return TokenStream(answer, frames, streams, headers, admission.release)
    render = partial(render_whole, answer, streams, arrived_s)
    return await respond_with_whole(request, own_id, streams, headers, render, admission.release)


def render_whole(answer: HttpAnswer, streams: Sequence[Stream], arrived_s: float) -> Whole:
    """The body of a whole answer and the headers of its end; `arrived_s` is when it was requested."""
    renderer = RENDERERS[answer.route](answer, streams)
    return renderer.render_whole(), usage_headers(renderer, streams, arrived_s)


def usage_headers(renderer: ResponseRenderer, streams: Sequence[Stream], arrived_s: float) -> dict[str, str]:
    """TGI's headers: token counts of all choices, and the times of the stream that ended last."""
    usage = renderer.usage()
    totals = {
        "x-prompt-tokens": str(usage["prompt_tokens"]),
        "x-generated-tokens": str(usage["completion_tokens"]),
    }
    return time_headers(max(streams, key=lambda stream: stream.ended_s), arrived_s) | totals
