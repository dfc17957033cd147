"""Response jobs: lines of batches for /v1/responses. Nothing is stored of them, so they begin no conversation
and go on with none.
"""

import hashlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

from api.answers.answer import HttpAnswer, ResponseParts, ResumeTerms
from api.errors import invalid
from api.event_loop import offload
from api.http.body import parse_body
from api.jobs.job import Job
from api.json import to_json
from api.protocols.openai_bodies import CHARS_OF_MESSAGE
from api.protocols.response_object import RENDERER, Item
from api.protocols.responses import ResponsesRequest, read_items, read_params, response_fields
from api.requests.pool import Pool
from api.requests.validate import validate
from api.streams.describe_answer import describe_answer
from api.streams.stream import Stream
from common.messages.request import Generate

ROUTE = "/v1/responses"
NOT_IN_JOBS = ("background", "previous_response_id", "resume_s", "webhook")
"""Fields of the route that need a response which is stored, or a client."""


@dataclass(frozen=True, slots=True)
class ResponseJob:
    """A validated job for a response; its `requests` have no ids yet."""

    requests: list[Generate]
    answer: HttpAnswer

    async def frames(self, streams: list[Stream]) -> AsyncIterator[list[tuple[int, bytes]]]:
        """One frame, the whole answer; none if the request has failed."""
        for stream in streams:
            await stream.ended.wait()
            if stream.finished:
                yield [(0, self.render_result(streams))]

    def render_result(self, streams: list[Stream]) -> bytes:
        return RENDERER.whole(self.answer, streams, 0.0)[0]


async def validate_response_job(pool: Pool, job: Job, model: str) -> ResponseJob:
    """Raises ApiError."""
    assert job.body is not None
    parameters = job.body.parameters or {}
    for name in NOT_IN_JOBS:
        if parameters.get(name):
            raise invalid(f"`{name}` is not served in a batch, which stores no response", name)
    content = to_json(parameters | {"input": job.body.input, "store": False})
    body = await offload(len(content), lambda: parse_body(ResponsesRequest, content))
    body.check()
    answer_id = hashlib.blake2b(job.id.encode(), digest_size=16).hexdigest()
    items = await read_own_items(pool, body, answer_id)
    chat = await read_params(body, items, pool)
    seed = job.seed if chat.params.seed is None else chat.params.seed
    params = replace(chat.params, seed=seed)
    requests = await validate(params, pool.workers.limits, pool.tokenizer, pool.pictures)
    answer = describe_answer(
        request_id=answer_id,
        route=ROUTE,
        streamed=False,
        model=model,
        requests=requests,
        prefixes=[""],
        rendering=chat.rendering,
        terms=ResumeTerms(detached=True),
        created_s=job.created_s,
    )
    fields = response_fields(body, params.sampling, job.terms.service_class)
    parts = ResponseParts(to_json(fields), to_json([]), to_json(items))
    return ResponseJob(requests, replace(answer, response=parts))


async def read_own_items(pool: Pool, body: ResponsesRequest, answer_id: str) -> list[Item]:
    """The items of the input. Raises ApiError, also for one that names an item of a stored response."""
    size = CHARS_OF_MESSAGE * len(body.input) if isinstance(body.input, list) else 0
    sees = pool.tokenizer.pictures is not None
    items = await offload(size, lambda: read_items(body.input, answer_id, sees))
    for i, item in enumerate(items):
        if item["type"] == "item_reference":
            name = f"input[{i}].type"
            raise invalid(f"`{name}`: references to items are not served in a batch", name)
    return items
