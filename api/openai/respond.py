"""The last step of OpenAI's routes: submit the requests, and respond with a stream or with the whole."""

from collections.abc import Callable, Sequence

from starlette.requests import Request
from starlette.responses import Response

from api.errors import invalid
from api.http.disconnect import wait_until_finished
from api.http.headers import prompt_headers, time_headers
from api.http.request_id import request_id
from api.http.sse import TokenStream
from api.inference.pool import Pool
from api.inference.stream import Stream
from api.offload import offload
from api.openai.choice import Choice, new_choice
from api.openai.render import ResponseRenderer
from api.openai.request_schemas import OpenAIRequest
from api.openai.stream import stream_frames
from common.messages.request import Generate

MakeRenderer = Callable[[str, str, list[Choice]], ResponseRenderer]
"""(id of the request, name of the model, choices) → renderer."""


async def respond(
    request: Request,
    pool: Pool,
    body: OpenAIRequest,
    requests: list[Generate],
    num_chars: int,
    prefixes: Sequence[str],
    make_renderer: MakeRenderer,
    arrived_s: float,
) -> Response:
    """Submit all `requests`, and respond with a stream or with the whole. Raises ApiError.

    Args:
        num_chars: characters of all prompts.
        prefixes: for each request, the text that its choice begins with.
    """
    settings, admission = pool.settings, pool.admission
    if len(requests) > settings.max_concurrent_requests:
        raise invalid(
            f"`n` asks for {len(requests)} choices: MAX_CONCURRENT_REQUESTS is "
            f"{settings.max_concurrent_requests}",
            "n",
        )
    streams = await admission.submit_all(requests, request_id(request))
    choices = [
        new_choice(i, stream, body, prefix)
        for i, (stream, prefix) in enumerate(zip(streams, prefixes, strict=True))
    ]
    renderer = make_renderer(request_id(request), settings.model_name, choices)
    headers = prompt_headers(settings, num_chars)
    if body.stream:
        return TokenStream(stream_frames(renderer), streams, headers, admission.release)
    await wait_until_finished(streams, request, admission.release)
    content = await offload(sum(stream.num_records for stream in streams), renderer.render_whole)
    return Response(content, 200, headers | usage_headers(renderer, streams, arrived_s), "application/json")


def usage_headers(renderer: ResponseRenderer, streams: Sequence[Stream], arrived_s: float) -> dict[str, str]:
    """TGI's headers: token counts of all choices, and the times of the stream that ended last."""
    usage = renderer.usage()
    totals = {
        "x-prompt-tokens": str(usage["prompt_tokens"]),
        "x-generated-tokens": str(usage["completion_tokens"]),
    }
    return time_headers(max(streams, key=lambda stream: stream.ended_s), arrived_s) | totals
