"""Jobs with `messages`: they have the fields, chunks and answers of /v1/chat/completions."""

from dataclasses import dataclass, replace

from api.answer import describe_answer
from api.errors import invalid
from api.event_loop.offload import offload
from api.http.body import parse_body
from api.inference.pool import Pool
from api.inference.validate import validate
from api.jobs.job import Job
from api.json import to_json
from api.openai.chat_params import read_chat
from api.openai.render_chat import ChatCompletionRenderer
from api.openai.request_schemas import ChatRequest
from api.openai.stream import ChunkFeed
from api.streams.stream import Stream
from common.messages.answer import HttpAnswer, ResumeTerms
from common.messages.request import Generate

NOT_PARAMETERS = ("messages", "model", "stream", "resume_s", "detached")
"""Fields of the route that a job has beside `parameters`, or replaces by `reply_to` and `reply`."""


@dataclass(frozen=True, slots=True)
class ChatJob:
    """A validated job; its `requests` have no ids yet."""

    requests: list[Generate]
    described: HttpAnswer

    def frames(self, streams: list[Stream]) -> ChunkFeed:
        """Chunks with their lanes; no `[DONE]`, which is not JSON."""
        return ChunkFeed(self.renderer(streams))

    def render_result(self, streams: list[Stream]) -> bytes:
        return self.renderer(streams).render_whole()

    def renderer(self, streams: list[Stream]) -> ChatCompletionRenderer:
        return ChatCompletionRenderer(self.described, streams)


async def validate_job(pool: Pool, job: Job) -> ChatJob:
    """Validate a job. Raises ApiError."""
    assert job.body is not None
    parameters = job.body.parameters or {}
    for name in NOT_PARAMETERS:
        if name in parameters:
            raise invalid(f"`{name}` is no parameter of a job", name)
    is_whole = not job.has_listeners and parameters.get("prompt_logprobs") is not None
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
