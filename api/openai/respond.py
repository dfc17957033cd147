"""Respond: the last step of OpenAI's routes. It submits the requests, and sends chunks or the whole."""

from collections.abc import Sequence
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from api.answers.answer import HttpAnswer, Rendering
from api.errors import failed, invalid, openai
from api.event_loop import offload
from api.http.sse import MAX_ITEMS, Change, Feed, MappedFeed, sse_frames
from api.json import to_json
from api.openai.render import ChatCompletionRenderer, ChoicesRenderer, CompletionRenderer
from api.openai.request_schemas import OpenAIRequest
from api.requests.pool import Pool
from api.requests.respond import AnswerRenderer, new_answer, submit_and_respond, total_headers
from api.streams.http_response import Whole
from api.streams.stream import Stream
from common.messages.request import Generate

NO_CHOICE = -1
"""Index of chunks that belong to no choice: usage and errors."""
RENDERERS: dict[str, type[ChoicesRenderer]] = {
    "/v1/chat/completions": ChatCompletionRenderer,
    "/v1/completions": CompletionRenderer,
}
"""Renderers by route."""


class ChunkFeed(Feed[tuple[int, bytes]]):
    """Chunks, each with the index of its choice, until all choices have ended or one has failed.

    Choices take turns, a piece each: the order of all chunks depends on the tokens alone.
    """

    def __init__(self, renderer: ChoicesRenderer) -> None:
        super().__init__(Change())
        self.renderer = renderer
        self.turns = list(renderer.choices)
        for choice in renderer.choices:
            choice.stream.changed = self.changed

    @property
    def is_prepared(self) -> bool:
        """Whether all log-probabilities of prompts are rendered."""
        return all(choice.begun or choice.stream.request.prompt_logprobs is None for choice in self.turns)

    async def prepare(self) -> None:
        for choice in self.turns:
            if choice.stream.num_tokens and not choice.begun:
                num_records = choice.stream.prompt.num_records
                await offload(num_records, partial(self.renderer.echoed_logprobs, choice))

    def take(self) -> list[tuple[int, bytes]]:
        new: list[tuple[int, bytes]] = []
        while self.turns and (choice := self.turns[0]).has_piece:
            del self.turns[0]
            new += [(choice.index, chunk) for chunk in self.renderer.render_next_chunks(choice)]
            if not choice.ended:
                self.turns.append(choice)
            if len(new) >= MAX_ITEMS:
                return new
        return [*new, *self.take_end()]

    def take_end(self) -> list[tuple[int, bytes]]:
        """The chunks after the last piece, if that was taken: usage, or an error."""
        if not self.turns:
            self.ended = True
            return [(NO_CHOICE, chunk) for chunk in self.renderer.render_last_chunks()]
        failure = self.turns[0].stream.terminal if self.turns[0].failed else None
        if failure is None:
            return []
        self.ended = True
        return [(NO_CHOICE, to_json(openai(failed(failure))[1]))]


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
    if len(requests) > (limit := pool.settings.max_concurrent_requests):
        raise invalid(
            f"`n` asks for {len(requests)} choices of all prompts: MAX_CONCURRENT_REQUESTS is {limit}", "n"
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
        webhook=body.webhook,
    )
    return await submit_and_respond(request, pool, answer, num_chars, RENDERER)


def render_frames(answer: HttpAnswer, streams: Sequence[Stream]) -> Feed[bytes]:
    """The frames of all chunks; the last one is `[DONE]`."""
    chunks = ChunkFeed(RENDERERS[answer.route](answer, streams))
    return sse_frames(answer, MappedFeed(chunks, lambda chunk: chunk[1], [b"[DONE]"]))


def render_whole(answer: HttpAnswer, streams: Sequence[Stream], arrived_s: float) -> Whole:
    renderer = RENDERERS[answer.route](answer, streams)
    body = renderer.render_whole()
    headers = total_headers(answer, streams, renderer.usage()["completion_tokens"], arrived_s)
    return body, renderer.logits.headers | headers


RENDERER = AnswerRenderer(render_frames, render_whole)
