"""Validated jobs, their frames and their results: a job is read, and answered, as the route whose fields it
has.
"""

import contextlib
import logging
import math
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import NamedTuple

from api.answers.answer import AnswerTerms, HttpAnswer
from api.errors import cut, internal_error, invalid, model_not_found, quoted
from api.event_loop import offload
from api.http.body import parse_body
from api.http.middleware import RequestTrace, generation_attributes
from api.jobs import scripts as job_scripts
from api.jobs.job import Job, content_of
from api.json import to_json
from api.protocols.protocol import Context, Renderer
from api.requests.pool import Pool, check_key_adapter, check_key_model, names_own
from api.requests.service_terms import with_adapter
from api.streams.stream import Stream
from common.broker.client import ERRORS
from common.broker.keys import RESULT_TTL_MS
from common.process.logs import TRACEPARENT
from common.tracing import NS_PER_MS

log = logging.getLogger(__name__)

JOB_TERMS = AnswerTerms(goes_on_s=math.inf, kept_s=RESULT_TTL_MS / 1000)
MAX_DEATHS = 2
"""Gateways that may end while they validate a job."""


@dataclass(frozen=True, slots=True)
class ValidatedJob:
    """A job that can be served."""

    answer: HttpAnswer
    renderer: type[Renderer]

    async def frames(self, streams: list[Stream]) -> AsyncIterator[list[tuple[int, bytes]]]:
        """Frames with their lanes: those of the answer, or else the whole; that one only of what has
        finished.
        """
        if (feed := self.renderer(self.answer, streams).chunks()) is None:
            for stream in streams:
                await stream.ended.wait()
            if all(stream.finished for stream in streams):
                yield [(0, self.render_result(streams))]
        else:
            async for new in feed:
                yield new

    def render_result(self, streams: list[Stream]) -> bytes:
        return self.renderer(self.answer, streams).whole()[0]


async def validate_job(pool: Pool, job: Job, model: "JobModel") -> ValidatedJob:
    """Read a job for this model as its route would read its body. Raises ApiError, also for a job that has
    ended MAX_DEATHS gateways while they validated it.
    """
    protocol = job.protocol
    assert protocol is not None
    async with noting_deaths(pool, job):
        content = to_json(content_of(job))
        body = await offload(len(content), lambda: parse_body(protocol.body, content))
        body.check()
        context = Context(pool, protocol.path, job.id, job.has_listeners, seed=job.seed)
        asked = await protocol.read(body, context)
        requests = job.terms.apply(with_adapter(asked.requests, model.adapter), pool.settings)
        asked = asked._replace(requests=requests)
        answer = context.describe(asked, model.name, JOB_TERMS, job.created_s)
        return ValidatedJob(answer, protocol.renderer)


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


# --- find model ---------------------------------------------------------------------------------------------


class JobModel(NamedTuple):
    """The model of a job.

    Attributes:
        name: of the pool's model, or of the adapter that the job names.
        adapter: key of that adapter; empty without one.
    """

    name: str
    adapter: str


async def find_model(pool: Pool, job: Job) -> JobModel:
    """The model that a job names: by its `model`, or one with `inputs` by TGI's `adapter_id`. Raises
    ApiError: 404 for the model of another pool, 403 for one that the job's key may not use, 422 for an
    adapter that there is not.
    """
    assert job.body is not None
    assert job.protocol is not None
    settings, adapter = pool.settings, None
    has_parameters = "parameters" in job.protocol.body.model_fields
    adapter_id = (job.body.parameters or {}).get("adapter_id") if has_parameters else None
    name = job.body.model if adapter_id is None else adapter_id
    # what is no text is refused later, with the other parameters
    if isinstance(name, str) and not (adapter_id is None and names_own(name, settings)):
        if adapter := await pool.find_adapter(name):
            pool.workers.check_adapter(adapter)
            check_key_adapter(job.terms.key, adapter.name)
        elif adapter_id is not None:
            raise invalid(f"`adapter_id`: there is no adapter {quoted(name)}", "adapter_id")
    if adapter is None and job.body.model and not names_own(job.body.model, settings):
        text = (
            f"The model `{cut(job.body.model)}` is not that of the pool {settings.pool}, nor an adapter of it"
        )
        raise model_not_found(f"{text}: jobs and batches go to the pool of their model")
    shown = adapter.name if adapter else settings.model_name
    check_key_model(job.terms.key, settings, shown)
    return JobModel(shown, adapter.key if adapter else "")


# --- job trace ----------------------------------------------------------------------------------------------


def begin_job_trace(pool: Pool, job: Job) -> RequestTrace | None:
    """The trace that a job names, or its own; None if it is not sampled. This task is in it from now on."""
    given = job.body.traceparent if job.body is not None else None
    trace = RequestTrace.begin(
        f"{pool.settings.pool}/{job.id}/{job.entry_ms}",
        {"traceparent": given} if given else {},
        name="process submit",
        kind="CONSUMER",
        inner_name=job.protocol.span if job.protocol else "generate",
        attributes={
            "messaging.system": "redis",
            "messaging.operation.name": "process",
            "messaging.operation.type": "process",
            "messaging.destination.name": pool.client.keys.submit,
            "messaging.message.id": job.entry_id,
            "tokenfleet.request.id": job.id,
        },
        started_ns=NS_PER_MS * job.due_ms,
    )
    TRACEPARENT.set(trace.generation if trace else "")
    return trace


def note_job(trace: RequestTrace | None, job: Job, answer: HttpAnswer) -> None:
    """Note what a valid job asks for."""
    if trace is not None and job.protocol is not None:
        trace.generation_attributes |= generation_attributes(
            answer.requests[0], job.protocol.operation, answer.model
        )
        trace.generation_attributes |= {"gen_ai.request.choice.count": len(answer.requests)}


def note_failure(trace: RequestTrace | None, error_type: str, why: str) -> None:
    if trace is not None:
        trace.attributes["error.type"] = error_type
        trace.error = trace.generation_error = why
