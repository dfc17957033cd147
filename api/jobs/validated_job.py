"""Validated jobs, their frames and their results. A job with `messages` has the fields, chunks and answers of
/v1/chat/completions, one with `prompt` those of /v1/completions; one with `inputs` has the parameters, frames
and answers of TGI's /generate_stream and /generate; one with `input` those of /v1/embeddings, and one with
`query` those of /v1/rerank.
"""

import contextlib
import logging
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, replace

from api.answers.answer import HttpAnswer, Rendering, ResumeTerms
from api.answers.logits import LogitsRenderer
from api.errors import internal_error, invalid
from api.event_loop import offload
from api.http.body import parse_body
from api.jobs import scripts as job_scripts
from api.jobs.job import Job, JobBody
from api.jobs.response_job import ResponseJob, validate_response_job
from api.json import to_json
from api.pooling.readers import Asked, read_embedding, read_rerank
from api.pooling.render import RENDERER
from api.pooling.request_schemas import EmbeddingRequest, RerankFields
from api.protocols import tgi as render
from api.protocols.openai import ChatCompletionRenderer, ChoicesRenderer, ChunkFeed, CompletionRenderer
from api.protocols.openai_bodies import ChatRequest, CompletionRequest, read_chat, read_completion
from api.protocols.tgi import GenerateParameters, GenerateRequest
from api.requests.logits import FIELDS
from api.requests.pool import Pool
from api.requests.validate import validate
from api.streams.describe_answer import describe_answer
from api.streams.stream import Stream
from common.broker.client import ERRORS
from common.messages.request import Generate

log = logging.getLogger(__name__)

MAX_DEATHS = 2
"""Gateways that may end while they validate a job."""
NOT_PARAMETERS = ("messages", "prompt", "model", "stream", "resume_s", "detached", "webhook", "not_before")
"""Fields of /v1/chat/completions that a job has beside its `parameters`, or does not have."""


async def validate_job(pool: Pool, job: Job, model: str) -> "ValidatedJob":
    """Validate a job, whose answer shows this name of its model. Raises ApiError, also for a job that has
    ended MAX_DEATHS gateways while they validated it.
    """
    async with noting_deaths(pool, job):
        if job.is_response:
            return await validate_response_job(pool, job, model)
        if job.is_completion:
            return await validate_completion_job(pool, job, model)
        if job.is_vector:
            return await validate_vector_job(pool, job, model)
        return await (validate_chat_job if job.is_chat else validate_generate_job)(pool, job, model)


@contextlib.asynccontextmanager
async def noting_deaths(pool: Pool, job: Job) -> AsyncIterator[None]:
    """Note in the job that this gateway validates it, as the work that an input can end a process with. A
    gateway that dies leaves its note; one that stops in order does not. A job that was validated once has no
    notes any more. Raises ApiError (500).
    """
    call = job_scripts.begin_validation(pool.client.keys, job.id, gateway=pool.gateway)
    dead = await pool.admission.retry_forever(lambda: pool.client.run(call))
    try:
        if len(dead) >= MAX_DEATHS:
            why = f"{len(dead)} gateways ended while they validated this request"
            log.error("job %s is not tried again: %s", job.id, why)
            raise internal_error(why)
        yield
    except BaseException:
        await drop_note(pool, job)
        raise


async def drop_note(pool: Pool, job: Job) -> None:
    """Drop the note of this gateway; if the broker is away, it stays."""
    with contextlib.suppress(*ERRORS):
        await pool.client.redis.hdel(  # type: ignore[misc]
            pool.client.keys.job(job.id), job_scripts.VALIDATES + pool.gateway
        )


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

    def renderer(self, streams: list[Stream]) -> ChoicesRenderer:
        return ChatCompletionRenderer(self.answer, streams)


async def validate_chat_job(pool: Pool, job: Job, model: str) -> ChatJob:
    assert job.body is not None
    parameters = job.body.parameters or {}
    check_parameters(parameters, NOT_PARAMETERS)
    whole_only = ("prompt_logprobs", *FIELDS)
    is_whole = not job.has_listeners and any(parameters.get(name) is not None for name in whole_only)
    content = to_json(parameters | {"messages": job.body.messages, "stream": not is_whole})
    chat = await offload(len(content), lambda: parse_body(ChatRequest, content))
    chat.check()
    read = await read_chat(chat, pool)
    params = replace(read.params, seed=job.seed if read.params.seed is None else read.params.seed)
    requests = await validate(params, pool.workers.limits, pool.tokenizer, pool.pictures)
    answer = describe_answer(
        request_id=job.id,
        route="/v1/chat/completions",
        streamed=True,
        model=model,
        requests=requests,
        prefixes=[read.prefix],
        rendering=read.rendering,
        terms=ResumeTerms(detached=True),
        created_s=job.created_s,
    )
    return ChatJob(requests, answer)


@dataclass(frozen=True, slots=True)
class CompletionJob(ChatJob):
    """A validated job with `prompt`; its `requests` have no ids yet."""

    def renderer(self, streams: list[Stream]) -> CompletionRenderer:
        return CompletionRenderer(self.answer, streams)


async def validate_completion_job(pool: Pool, job: Job, model: str) -> CompletionJob:
    assert job.body is not None
    parameters = job.body.parameters or {}
    check_parameters(parameters, NOT_PARAMETERS)
    content = to_json(parameters | {"prompt": job.body.prompt, "stream": job.has_listeners})
    completion = await offload(len(content), lambda: parse_body(CompletionRequest, content))
    completion.check()
    read = await read_completion(completion, pool, job.seed)
    answer = describe_answer(
        request_id=job.id,
        route="/v1/completions",
        streamed=job.has_listeners,
        model=model,
        requests=read.requests,
        prefixes=read.prefixes,
        rendering=read.rendering,
        terms=ResumeTerms(detached=True),
        created_s=job.created_s,
    )
    return CompletionJob(read.requests, answer)


def check_parameters(parameters: Mapping[str, object], refused: Iterable[str]) -> None:
    """Raises ApiError (422) for a parameter that is a field of the job, or that jobs do not have."""
    for name in refused:
        if name in parameters:
            raise invalid(f"`{name}` is no parameter of a job", name)


@dataclass(frozen=True, slots=True)
class GenerateJob:
    """A validated job with `inputs`; its `requests` have no ids yet."""

    requests: list[Generate]
    answer: HttpAnswer

    async def frames(self, streams: list[Stream]) -> AsyncIterator[list[tuple[int, bytes]]]:
        """Frames with their lane; none with `best_of`, whose best text is known at the end."""
        for stream in streams if len(streams) == 1 else []:
            async for bodies in render.stream_bodies(self.answer, stream):
                yield [(0, body) for body in bodies]

    def render_result(self, streams: list[Stream]) -> bytes:
        return to_json(render.render_response(self.answer, streams, LogitsRenderer()))


async def validate_generate_job(pool: Pool, job: Job, model: str) -> GenerateJob:
    assert job.body is not None
    content = to_json({"inputs": job.body.inputs, "parameters": job.body.parameters})
    body = await offload(len(content), lambda: parse_body(GenerateRequest, content))
    parameters = body.parameters or GenerateParameters()
    params, limits = body.generation_params(job.has_listeners), pool.workers.limits
    render.check_best_of(params, limits, job.has_listeners)
    params = replace(params, seed=job.seed if params.seed is None else params.seed)
    requests = await validate(params, limits, pool.tokenizer, pool.pictures)
    if params.n > 1:
        requests = render.with_own_seeds(requests, job.seed)
    answer = describe_answer(
        request_id=job.id,
        route="/generate",
        streamed=job.has_listeners,
        model=model,
        requests=requests,
        prefixes=[body.inputs if parameters.return_full_text else ""],
        rendering=Rendering(details=parameters.wants_details),
        terms=ResumeTerms(detached=True),
        created_s=job.created_s,
    )
    return GenerateJob(requests, answer)


@dataclass(frozen=True, slots=True)
class VectorJob:
    """A validated job for vectors or scores; its `requests` have no ids yet."""

    requests: list[Generate]
    answer: HttpAnswer

    async def frames(self, streams: list[Stream]) -> AsyncIterator[list[tuple[int, bytes]]]:
        """One frame, the whole answer; none if a request has failed."""
        for stream in streams:
            await stream.ended.wait()
        if all(stream.finished for stream in streams):
            yield [(0, self.render_result(streams))]

    def render_result(self, streams: list[Stream]) -> bytes:
        return RENDERER.whole(self.answer, streams, 0.0)[0]


async def validate_vector_job(pool: Pool, job: Job, model: str) -> VectorJob:
    assert job.body is not None
    asked, route = await read_vector_job(pool, job.body)
    requests = asked.inputs.requests
    answer = describe_answer(
        request_id=job.id,
        route=route,
        streamed=False,
        model=model,
        requests=requests,
        prefixes=[""] * len(requests),
        rendering=Rendering(),
        terms=ResumeTerms(detached=True),
        created_s=job.created_s,
    )
    return VectorJob(requests, replace(answer, vectors=asked.shown))


async def read_vector_job(pool: Pool, body: JobBody) -> tuple[Asked, str]:
    """What the job asks for, and the route of which it has the fields. Raises ApiError."""
    parameters = body.parameters or {}
    check_parameters(parameters, ("model", "not_before"))
    if body.query is None:
        content = to_json(parameters | {"input": body.input})
        embedding = await offload(len(content), lambda: parse_body(EmbeddingRequest, content))
        embedding.check()
        return await read_embedding(pool, embedding, "/v1/embeddings"), "/v1/embeddings"
    content = to_json(parameters | {"query": body.query, "documents": body.documents})
    rerank = await offload(len(content), lambda: parse_body(RerankFields, content))
    rerank.check()
    return await read_rerank(pool, rerank, "/v1/rerank"), "/v1/rerank"


ValidatedJob = ChatJob | CompletionJob | GenerateJob | ResponseJob | VectorJob
