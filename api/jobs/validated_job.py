"""Validated jobs, their frames and their results. A job with `messages` has the fields, chunks and answers of
/v1/chat/completions; one with `inputs` has the parameters, frames and answers of TGI's /generate_stream and
/generate.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

from api.answers.logits import LogitsRenderer
from api.errors import invalid
from api.event_loop import offload
from api.http.body import parse_body
from api.jobs.job import Job
from api.json import to_json
from api.openai.params import read_chat
from api.openai.render import ChatCompletionRenderer
from api.openai.request_schemas import ChatRequest
from api.openai.respond import ChunkFeed
from api.requests.logits import FIELDS
from api.requests.pool import Pool
from api.requests.validate import validate
from api.streams.describe_answer import describe_answer
from api.streams.stream import Stream
from api.tgi import render
from api.tgi.request_schemas import GenerateParameters, GenerateRequest
from common.messages.answer import HttpAnswer, ResumeTerms
from common.messages.request import Generate

NOT_PARAMETERS = ("messages", "model", "stream", "resume_s", "detached")
"""Fields of /v1/chat/completions that a job has beside its `parameters`, or does not have."""


async def validate_job(pool: Pool, job: Job) -> "ChatJob | GenerateJob":
    """Validate a job. Raises ApiError."""
    return await (validate_chat_job(pool, job) if job.is_chat else validate_generate_job(pool, job))


@dataclass(frozen=True, slots=True)
class ChatJob:
    """A validated job with `messages`; its `requests` have no ids yet."""

    requests: list[Generate]
    answer: HttpAnswer

    def frames(self, streams: list[Stream]) -> ChunkFeed:
        """Chunks with their lanes, the indices of their choices; without `[DONE]`, which is no JSON."""
        return ChunkFeed(self.renderer(streams))

    def render_result(self, streams: list[Stream]) -> bytes:
        return self.renderer(streams).render_whole()

    def renderer(self, streams: list[Stream]) -> ChatCompletionRenderer:
        return ChatCompletionRenderer(self.answer, streams)


async def validate_chat_job(pool: Pool, job: Job) -> ChatJob:
    assert job.body is not None
    parameters = job.body.parameters or {}
    for name in NOT_PARAMETERS:
        if name in parameters:
            raise invalid(f"`{name}` is no parameter of a job", name)
    whole_only = ("prompt_logprobs", *FIELDS)
    is_whole = not job.has_listeners and any(parameters.get(name) is not None for name in whole_only)
    content = to_json(parameters | {"messages": job.body.messages, "stream": not is_whole})
    chat = await offload(len(content), lambda: parse_body(ChatRequest, content))
    chat.check()
    read = await read_chat(chat, pool)
    params = replace(read.params, seed=job.seed if read.params.seed is None else read.params.seed)
    requests = await validate(params, pool.workers.limits, pool.tokenizer)
    answer = describe_answer(
        request_id=job.id,
        route="/v1/chat/completions",
        streamed=True,
        model=pool.settings.model_name,
        requests=requests,
        prefixes=[read.prefix],
        rendering=read.rendering,
        terms=ResumeTerms(detached=True),
        created_s=job.created_s,
    )
    return ChatJob(requests, answer)


@dataclass(frozen=True, slots=True)
class GenerateJob:
    """A validated job with `inputs`; its `requests` have no ids yet.

    Attributes:
        prefix: the text that the answer begins with.
        details: whether the answer has `details`.
    """

    requests: list[Generate]
    prefix: str
    details: bool

    async def frames(self, streams: list[Stream]) -> AsyncIterator[list[tuple[int, bytes]]]:
        """Frames with their lane; none with `best_of`, whose best text is known at the end."""
        for stream in streams if len(streams) == 1 else []:
            async for bodies in render.stream_bodies(stream, self.prefix, self.details):
                yield [(0, body) for body in bodies]

    def render_result(self, streams: list[Stream]) -> bytes:
        response = render.render_response(streams, self.prefix, self.details, LogitsRenderer())
        return to_json(response)


async def validate_generate_job(pool: Pool, job: Job) -> GenerateJob:
    assert job.body is not None
    content = to_json({"inputs": job.body.inputs, "parameters": job.body.parameters})
    body = await offload(len(content), lambda: parse_body(GenerateRequest, content))
    parameters = body.parameters or GenerateParameters()
    params, limits = body.generation_params(job.has_listeners), pool.workers.limits
    render.check_best_of(params, limits, job.has_listeners)
    params = replace(params, seed=job.seed if params.seed is None else params.seed)
    requests = await validate(params, limits, pool.tokenizer)
    if params.n > 1:
        requests = render.with_own_seeds(requests, job.seed)
    return GenerateJob(requests, body.inputs if parameters.return_full_text else "", parameters.wants_details)
