"""Protocol: what a route that makes answers is. Each has one row, in the file of its API. Whoever depends on
the route asks the row: HTTP (api/protocols/table.py), errors, traces, resumption, jobs and batches.
"""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from typing import Any, NamedTuple, Union

from sse_starlette import EventSourceResponse
from starlette.requests import Request
from starlette.types import Scope

from api.answers.answer import HttpAnswer
from api.errors import Family, anthropic, invalid, kserve, openai, tgi
from api.event_loop import Pace
from api.http.body import KEY_REUSED
from api.http.openapi import Responses, json_answer, json_body
from api.http.sse import Feed
from api.prompts.tokenizer import ModelTokenizer
from api.requests.fields import Strict
from api.requests.pool import Pool
from api.requests.service_terms import SERVICE_HEADERS
from api.requests.validate import GenerationParams, check_size, num_added_first, validate, with_truncate
from api.streams.stream import Stream
from api.webhooks import REQUEST
from common.messages.records import unpack_ids
from common.messages.request import Generate

FINGERPRINT = f"tokenfleet-{version('tokenfleet')}"
ROW = "protocol"
"""Key of a request's state: the row of its route; None for a route without one."""
ERRORS_BELOW: dict[str, Family] = {
    "/v1/messages": anthropic,
    "/v1": openai,
    "/v2": kserve,
    "/detokenize": openai,
}
"""Paths → the errors of all routes at and below them that have no row."""

WholeBody = tuple[bytes, int]
"""The body of a whole answer, and the number of generated tokens that its headers show."""


class Renderer(ABC):
    """Renders one answer of an API, once: as frames or as a whole.

    Attributes:
        streams: of its requests. It is their only reader.
    """

    def __init__(self, answer: HttpAnswer, streams: Sequence[Stream]) -> None:
        self.answer = answer
        self.streams = streams

    @abstractmethod
    def whole(self) -> WholeBody:
        """The body of a whole answer, once all streams have finished."""

    def frames(self) -> Feed:
        """All frames of a stream, from the first one on."""
        raise NotImplementedError

    def chunks(self) -> Feed | None:
        """The frames of a job; None where the whole is the only frame."""
        return None


class Context(NamedTuple):
    """For whom a body is read.

    Attributes:
        route: path at which it is asked.
        answer_id: id of the answer.
        streamed: whether frames are wanted.
        model: by the name that the answer shows.
        created_s: the broker's time.
        adapter: the key of the adapter with which it is served; empty without one.
        request: over HTTP; None for a job.
        seed: of a body without one; None draws one.
    """

    pool: Pool
    route: str
    answer_id: str
    streamed: bool
    model: str
    created_s: int
    adapter: str = ""
    request: Request | None = None
    seed: int | None = None

    def check_number(self, number: int, field: str) -> None:
        """Raises ApiError (422) for a field without prompts, or with more than a request may have."""
        most = self.pool.workers.limits.max_client_batch_size
        if not 0 < number <= most:
            raise invalid(f"`{field}` must have 1 to {most} items. Given: {number}")

    async def ask(self, prompts: Sequence[GenerationParams], **own: Any) -> HttpAnswer:
        """The answer that a body asks for: to its prompts, each with its choices, and with what is its `own`.
        Raises ApiError, also for more choices than are ever admitted together; those of a job come one by
        one.
        """
        pool, limits = self.pool, self.pool.workers.limits
        requests: list[Generate] = []
        prefixes, pace = [], Pace()
        for params in (with_truncate(one, limits) for one in prompts):
            choices = await validate(params, limits, pool.tokenizer, pool.pictures, self.seed)
            requests += choices
            prefixes.append(shown_prefix(params, choices[0], pool.tokenizer))
            await pace.step()
        check_size(requests)
        most, number = pool.settings.max_concurrent_requests, len(requests)
        if self.request is not None and number > most:
            words = f"asks for {number} choices of all prompts: MAX_CONCURRENT_REQUESTS is {most}"
            with prompts[0].naming():
                raise invalid(f"`n` {words}")
        num_chars = sum(len(one.prompt.text) for one in prompts if one.prompt)
        return self.answer(requests, prefixes, num_chars, rendering=prompts[0].rendering, **own)

    def answer(
        self, requests: Sequence[Generate], prefixes: Sequence[str], num_chars: int, **own: Any
    ) -> HttpAnswer:
        """The answer to requests, which have no ids and no terms yet: those of the choices of the first
        prompt, then those of the next. A beam search is one request for all choices of its prompt.

        Args:
            prefixes: for each prompt, the text with which its choices begin.
            num_chars: characters of all prompts.
        """
        per_prompt, beams = len(requests) // len(prefixes), requests[0].beams
        return HttpAnswer(
            request_id=self.answer_id,
            route=self.route,
            streamed=self.streamed,
            created_s=self.created_s,
            model=self.model,
            fingerprint=FINGERPRINT,
            n=beams.num_returned if beams else per_prompt,
            prompts=[request.prompt_ids for request in requests[::per_prompt]],
            requests=[replace(request, prompt_ids=b"") for request in requests],
            prefixes=[*prefixes],
            num_chars=num_chars,
            **own,
        )


def shown_prefix(params: GenerationParams, request: Generate, tokenizer: ModelTokenizer) -> str:
    """The text that the choices of a prompt begin with."""
    if params.prefix is not None:
        return params.prefix
    if params.prompt is not None and params.truncate != request.num_prompt:
        return params.prompt.text
    ids = unpack_ids(request.prompt_ids)
    return tokenizer.text_of(ids[num_added_first(params, ids, tokenizer) :])


class Protocol(NamedTuple):
    """A route that makes answers: its row.

    Attributes:
        path: with `{model:path}` for a part of it; `aliases` are served alike, and not described.
        instead_of: routes of other servers in whose place clients may ask for it.
        name: of its operation in /docs.
        body: what a body is read into. Its fields `model`, `adapter_id`, `stream`, `resume_s`, `detached`,
            `priority`, `service_tier` and `webhook`, where it has them, say how it is served.
        read: the answer that a body asks for, without its terms. Raises ApiError.
        error: the form of its errors, and `errors` what /docs says of them.
        tag, summary, description, example: what /docs says of it, with a body.
        whole: the shape of a whole answer; None for a route that only streams.
        events: the content of a stream, as of `event_stream`.
        parameters: of the path.
        span: TGI's name of its spans, and `operation` that of GenAI.
        streams: whether it answers in frames; None where the body's `stream` says so.
        by_field: other rows, by the field that a body for them has.
        resumable: a POST with `Last-Event-ID` goes on with an earlier answer.
        job: what jobs of this kind are called.
        prompt: the fields of a body that stand in a job beside its parameters.
        in_jobs: a job with the first field of `prompt` is one of this route.
        in_batches: lines of batches may ask for it.
        event: what its answer is to its webhook.
    """

    path: str
    name: str
    body: type[Strict]
    read: Callable[[Any, Context], Awaitable[HttpAnswer]]
    renderer: type[Renderer]
    error: Family
    errors: Responses
    tag: str
    summary: str
    description: str
    example: Mapping[str, Any]
    whole: Any = None
    events: Mapping[str, Any] = {}
    parameters: Sequence[Mapping[str, Any]] = ()
    span: str = "generate"
    operation: str = "text_completion"
    aliases: Sequence[str] = ()
    instead_of: Sequence[str] = ()
    streams: bool | None = None
    by_field: Mapping[str, "Protocol"] = {}
    resumable: bool = False
    job: str = "generate"
    prompt: Sequence[str] = ()
    in_jobs: bool = False
    in_batches: bool = False
    event: str = REQUEST

    @property
    def docs(self) -> dict[str, Any]:
        """What /docs says of it, for FastAPI."""
        content = {**(json_answer(self.whole) if self.whole else {}), **self.events}
        rows = self.by_field.values() or (self,)
        bodies: Any = Union[tuple(row.body for row in rows)]  # noqa: UP007
        body = json_body(bodies, dict(self.example))
        conflict = {**self.errors[503], "description": KEY_REUSED}
        return {
            "tags": [self.tag],
            "summary": self.summary,
            "description": self.description,
            "responses": {409: conflict, **self.errors, 200: {"content": content}},
            "openapi_extra": body | {"parameters": [*self.parameters, *SERVICE_HEADERS]},
            **({} if self.whole else {"response_class": EventSourceResponse}),
        }


def row_of(scope: Scope) -> Protocol | None:
    """The row of a request's route."""
    row: Protocol | None = scope["state"].get(ROW)
    return row


def asks_for_tokens(scope: Scope) -> bool:
    """Whether a request is for tokens, vectors or scores: it is counted, traced, and part of the gateway's
    load.
    """
    return row_of(scope) is not None and scope["method"] == "POST"


def errors_of(scope: Scope) -> Family:
    """The form of a request's errors, also on a path that no route has."""
    row, path = row_of(scope), scope["path"]
    if row is not None:
        return row.error
    below = (
        family for start, family in ERRORS_BELOW.items() if path == start or path.startswith(f"{start}/")
    )
    return next(below, tgi)
