"""Job trace: the outer spans of a job; the first one is a consumer's, by the conventions of messaging. A job
is traced like a request over HTTP; a gateway that goes on with a job goes on with its trace.
"""

from collections.abc import Sequence

from api.http.request_trace import RequestTrace
from api.jobs.job import Job
from api.requests.pool import Pool
from api.streams.answer_trace import generation_attributes
from common.messages.request import Generate
from common.process.logs import TRACEPARENT
from common.tracing import NS_PER_MS


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


def note_job(trace: RequestTrace | None, job: Job, requests: Sequence[Generate], model: str) -> None:
    """Note what a valid job asks for."""
    if trace is not None and job.protocol is not None:
        trace.generation_attributes |= generation_attributes(requests[0], job.protocol.operation, model)
        trace.generation_attributes |= {"gen_ai.request.choice.count": len(requests)}


def note_failure(trace: RequestTrace | None, error_type: str, why: str) -> None:
    if trace is not None:
        trace.attributes["error.type"] = error_type
        trace.error = trace.generation_error = why
