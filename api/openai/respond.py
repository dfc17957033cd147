"""The last step of OpenAI's routes: describe the answer, submit its requests, and respond."""

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from api.errors import invalid
from api.event_loop.feed import Feed
from api.http.sse import sse_frames
from api.inference.headers import total_headers
from api.inference.pool import Pool
from api.inference.respond import AnswerRenderer, new_answer, submit_and_respond
from api.openai.render import ChoicesRenderer
from api.openai.render_chat import ChatCompletionRenderer
from api.openai.render_completion import CompletionRenderer
from api.openai.shared_fields import OpenAIRequest
from api.openai.stream import stream_bodies
from api.streams.stream import Stream
from api.streams.whole import Whole
from common.messages.answer import HttpAnswer, Rendering
from common.messages.request import Generate

BY_ROUTE: dict[str, type[ChoicesRenderer]] = {
    "/v1/chat/completions": ChatCompletionRenderer,
    "/v1/completions": CompletionRenderer,
}


async def respond(
    request: Request,
    pool: Pool,
    body: OpenAIRequest,
    requests: list[Generate],
    num_chars: int,
    prefixes: Sequence[str],
    rendering: Rendering,
) -> Response:
    """Submit all `requests`, and respond with a stream or with the whole. Raises ApiError.

    Args:
        num_chars: characters of all prompts.
        prefixes: for each prompt, the text that its choices begin with.
    """
    if len(requests) > (most := pool.settings.max_concurrent_requests):
        raise invalid(
            f"`n` asks for {len(requests)} choices of all prompts: MAX_CONCURRENT_REQUESTS is {most}", "n"
        )
    answer = new_answer(
        request,
        pool,
        requests=requests,
        prefixes=prefixes,
        rendering=rendering,
        streamed=bool(body.stream),
        resume_s=body.resume_s,
        detached=body.detached,
        priority=body.priority,
        service_tier=body.service_tier,
    )
    return await submit_and_respond(request, pool, answer, num_chars, RENDERER)


def render_frames(answer: HttpAnswer, streams: Sequence[Stream]) -> Feed[bytes]:
    return sse_frames(answer, stream_bodies(BY_ROUTE[answer.route](answer, streams)))


def render_whole(answer: HttpAnswer, streams: Sequence[Stream], arrived_s: float) -> Whole:
    renderer = BY_ROUTE[answer.route](answer, streams)
    body = renderer.render_whole()
    return body, total_headers(answer, streams, renderer.usage()["completion_tokens"], arrived_s)


RENDERER = AnswerRenderer(render_frames, render_whole)
