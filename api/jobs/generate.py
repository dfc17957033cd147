"""Jobs with `inputs`: they have the parameters, frames and answers of TGI's /generate_stream and
/generate.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

from api.event_loop.offload import offload
from api.http.body import parse_body
from api.inference.pool import Pool
from api.inference.validate import validate
from api.jobs.job import Job
from api.json import to_json
from api.streams.stream import Stream
from api.tgi import best_of, render
from api.tgi.request_schemas import GenerateParameters, GenerateRequest
from common.messages.request import Generate


@dataclass(frozen=True, slots=True)
class GenerateJob:
    """A validated job; its `requests` have no ids yet."""

    requests: list[Generate]
    prefix: str
    details: bool

    async def frames(self, streams: list[Stream]) -> AsyncIterator[list[tuple[int, bytes]]]:
        """Frames with their lane; none with `best_of`, whose best answer is known at the end."""
        for stream in streams if len(streams) == 1 else []:
            async for bodies in render.StreamBodies(stream, self.prefix, self.details):
                yield [(0, body) for body in bodies]

    def render_result(self, streams: list[Stream]) -> bytes:
        best, *others = best_of.rank_by_logprob(streams)
        return to_json(render.render_response(best, others, self.prefix, self.details))


async def validate_job(pool: Pool, job: Job) -> GenerateJob:
    """Validate a job. Raises ApiError."""
    assert job.body is not None
    content = to_json({"inputs": job.body.inputs, "parameters": job.body.parameters})
    body = await offload(len(content), lambda: parse_body(GenerateRequest, content))
    parameters = body.parameters or GenerateParameters()
    params, limits = body.generation_params(job.has_listeners), pool.workers.limits
    best_of.check(params, limits, job.has_listeners)
    params = replace(params, seed=job.seed if params.seed is None else params.seed)
    requests = await validate(params, limits, pool.tokenizer)
    if params.n > 1:
        requests = best_of.with_own_seeds(requests, job.seed)
    return GenerateJob(requests, body.inputs if parameters.return_full_text else "", parameters.wants_details)
