"""Validated jobs, their frames and their results: a job is read, and answered, as the route whose fields it
has.
"""

import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

from api.answers.answer import HttpAnswer, ResumeTerms
from api.errors import internal_error
from api.event_loop import offload
from api.http.body import parse_body
from api.jobs import scripts as job_scripts
from api.jobs.job import Job, content_of
from api.json import to_json
from api.protocols.protocol import AnswerRenderer, Context
from api.requests.pool import Pool
from api.streams.describe_answer import describe_answer
from api.streams.stream import Stream
from common.broker.client import ERRORS
from common.messages.request import Generate

log = logging.getLogger(__name__)

MAX_DEATHS = 2
"""Gateways that may end while they validate a job."""


@dataclass(frozen=True, slots=True)
class ValidatedJob:
    """A job that can be served; its `requests` have no ids yet."""

    requests: list[Generate]
    answer: HttpAnswer
    renderer: AnswerRenderer

    async def frames(self, streams: list[Stream]) -> AsyncIterator[list[tuple[int, bytes]]]:
        """Frames with their lanes: those of the answer, or else the whole; that one only of what has
        finished.
        """
        if self.renderer.chunks is None:
            for stream in streams:
                await stream.ended.wait()
            if all(stream.finished for stream in streams):
                yield [(0, self.render_result(streams))]
        elif (feed := self.renderer.chunks(self.answer, streams)) is not None:
            async for new in feed:
                yield new

    def render_result(self, streams: list[Stream]) -> bytes:
        return self.renderer.whole(self.answer, streams, 0.0)[0]


async def validate_job(pool: Pool, job: Job, model: str) -> ValidatedJob:
    """Validate a job, whose answer shows this name of its model. Raises ApiError, also for a job that has
    ended MAX_DEATHS gateways while they validated it.
    """
    async with noting_deaths(pool, job):
        return await run(pool, job, model)


async def run(pool: Pool, job: Job, model: str) -> ValidatedJob:
    """Read a job as its route would read its body. Raises ApiError."""
    protocol = job.protocol
    assert protocol is not None
    content = to_json(content_of(job))
    body = await offload(len(content), lambda: parse_body(protocol.body, content))
    body.check()
    asked = await protocol.read(body, Context(pool, protocol.path, job.id, job.has_listeners, seed=job.seed))
    answer = describe_answer(
        request_id=job.id,
        route=protocol.path,
        streamed=job.has_listeners,
        model=model,
        requests=job.terms.apply(asked.requests, pool.settings),
        prefixes=asked.prefixes,
        rendering=asked.rendering,
        terms=ResumeTerms(detached=True),
        created_s=job.created_s,
    )
    return ValidatedJob(asked.requests, replace(answer, **asked.parts), protocol.renderer)


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
