"""What both of OpenAI's routes do with a request that was found valid."""

from collections.abc import Callable, Sequence

from starlette.requests import Request
from starlette.responses import Response

from api.errors import invalid
from api.http.disconnect import finished
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
"""(id of the request, name of the model, choices) → the answer."""


async def respond(
    request: Request,
    pool: Pool,
    body: OpenAIRequest,
    requests: list[Generate],
    num_chars: int,
    prefixes: Sequence[str],
    make: MakeRenderer,
    begun_s: float,
) -> Response:
    """The answer to all `requests`, as a stream or as a whole.

    Args:
        num_chars: of all prompts.
        prefixes: for each request, what its choice begins with.

    Raises ApiError.
    """
    settings, admission = pool.settings, pool.admission
    if len(requests) > settings.max_concurrent_requests:
        raise invalid(
            f"`n` asks for {len(requests)} choices: MAX_CONCURRENT_REQUESTS is {settings.max_concurrent_requests}",
            "n",
        )
    streams = await admission.submit_all(requests, request_id(request))
    choices = [
        new_choice(i, stream, body, prefix)
        for i, (stream, prefix) in enumerate(zip(streams, prefixes, strict=True))
    ]
    answer = make(request_id(request), settings.model_name, choices)
    headers = prompt_headers(settings, num_chars)
    if body.stream:
        return TokenStream(stream_frames(answer), streams, headers, admission.release)
    await finished(streams, request, admission.release)
    content = await offload(sum(stream.num_records for stream in streams), answer.render_whole)
    return Response(content, 200, headers | usage_headers(answer, streams, begun_s), "application/json")


def usage_headers(answer: ResponseRenderer, streams: Sequence[Stream], begun_s: float) -> dict[str, str]:
    """Times are those of the stream that ended last."""
    usage = answer.usage()
    totals = {
        "x-prompt-tokens": str(usage["prompt_tokens"]),
        "x-generated-tokens": str(usage["completion_tokens"]),
    }
    return time_headers(max(streams, key=lambda stream: stream.ended_s), begun_s) | totals
