"""Finding a job's model: the pool's own, or one of its adapters."""

from typing import NamedTuple

from api.errors import cut, invalid, model_not_found, quoted
from api.jobs.job import Job
from api.requests.pool import Pool
from api.requests.pool_registry import check_key_adapter, check_key_model, names_own
from common.adapters import PoolAdapter
from common.settings.settings import Settings


class JobModel(NamedTuple):
    """The model of a job.

    Attributes:
        name: of the pool's model, or of the adapter that the job names.
        adapter: key of that adapter; empty without one.
    """

    name: str
    adapter: str


async def find_model(pool: Pool, job: Job) -> JobModel:
    """Raises ApiError: 404 for the model of another pool, 403 for one that the job's key may not use."""
    adapter = await find_job_adapter(pool, job)
    if adapter is None:
        check_model(job, pool.settings)
    else:
        check_key_adapter(job.terms.key, adapter.name)
    name = adapter.name if adapter else pool.settings.model_name
    check_key_model(job.terms.key, pool.settings, name)
    return JobModel(name, adapter.key if adapter else "")


def check_model(job: Job, settings: Settings) -> None:
    """Raises ApiError (404) for models of other pools, each of which has its own stream of jobs."""
    model = job.body and job.body.model
    if model and not names_own(model, settings):
        text = f"The model `{cut(model)}` is not that of the pool {settings.pool}, nor an adapter of it"
        raise model_not_found(f"{text}: jobs and batches go to the pool of their model")


async def find_job_adapter(pool: Pool, job: Job) -> PoolAdapter | None:
    """The adapter that a job names: as its `model`, or one with `inputs` by TGI's `adapter_id`. Raises
    ApiError (422).
    """
    assert job.body is not None
    assert job.protocol is not None
    has_parameters = "parameters" in job.protocol.body.model_fields
    adapter_id = (job.body.parameters or {}).get("adapter_id") if has_parameters else None
    name = job.body.model if adapter_id is None else adapter_id
    if not isinstance(name, str) or (adapter_id is None and names_own(name, pool.settings)):
        return None  # the fields of `parameters` are checked later
    if adapter := await pool.find_adapter(name):
        pool.check_adapter(adapter)
    elif adapter_id is not None:
        raise invalid(f"`adapter_id`: there is no adapter {quoted(name)}", "adapter_id")
    return adapter
