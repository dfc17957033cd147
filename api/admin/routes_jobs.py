"""Admin routes of jobs: GET /admin/jobs, which lists and searches them, GET /admin/jobs/{job_id}, and POST
/admin/jobs/{job_id}/cancel and …/retry. They do what `tokenfleet jobs` does.
"""

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query, Request
from pydantic import BaseModel
from starlette.responses import Response

from api.errors import ApiError, asking_broker
from api.http.openapi import FLEET, TGI_ERRORS, ErrorResponse, Responses, error_responses, only
from api.jobs import records
from api.jobs.listing import JobQuery, count_jobs, read_content, read_page, read_record
from api.jobs.scripts import JobRecord
from api.json import fresh_json
from api.requests.on_pool import own_pool

ERRORS: Responses = only(TGI_ERRORS, 401, 403, 422, 503)
NO_JOB = "There is no such job"
router = APIRouter(responses=ERRORS, tags=[FLEET])
MAX_LISTED = 200
State = Literal["queued", "running", "scheduled", "done", "failed", "cancelled", "dead"]
JobId = Annotated[str, Path(description="Its `id`.", min_length=1, max_length=128)]


class JobInfo(BaseModel):
    """A job. Times are Unix times in s, 0 where there is none.

    Attributes:
        created_at: when it was submitted.
        not_before: until when it waits.
        status, reason, error: of a job that has ended, as HTTP would answer it.
        retries: how many times it was tried again.
    """

    id: str
    state: State
    kind: str
    model: str
    tenant: str
    key_id: str
    service_class: str
    created_at: int
    not_before: float
    ended_at: int
    status: int
    reason: str
    error: str
    retries: int


class JobList(BaseModel):
    """A page of jobs.

    Attributes:
        cursor: where the next page begins; null after the last one. A page may have fewer than `limit` jobs,
            even none, though others follow.
        counts: jobs that are live (queued or running), scheduled, dead, or ended otherwise.
    """

    jobs: list[JobInfo]
    cursor: str | None
    counts: dict[str, int]


class JobDetails(JobInfo):
    """A job with what it asks for, null of one that is not kept: it has ended, and is not dead."""

    job: dict[str, Any] | None


@router.get("/admin/jobs", summary="List jobs", response_model=JobList)
async def list_jobs(
    request: Request,
    status: Annotated[State | None, Query(description="Jobs in this state.")] = None,
    tenant: Annotated[str, Query(description="Jobs of this tenant.", max_length=128)] = "",
    search: Annotated[str, Query(description="Jobs whose id has this text.", max_length=128)] = "",
    cursor: Annotated[str, Query(description="The `cursor` of the page before.", max_length=200)] = "",
    limit: Annotated[int, Query(ge=1, le=MAX_LISTED, description="Most jobs.")] = 50,
) -> Response:
    """Returns jobs over Redis and of arq: live ones, then scheduled, dead, and ended ones."""
    client = own_pool(request).client
    async with asking_broker():
        page = await read_page(client, JobQuery(status or "", tenant, search), cursor, limit)
        counts = await count_jobs(client)
    return fresh_json({"jobs": [*map(describe, page.records)], "cursor": page.cursor, "counts": counts})


@router.get(
    "/admin/jobs/{job_id:path}",
    summary="Show a job",
    response_model=JobDetails,
    responses=error_responses(ErrorResponse, {404: NO_JOB}),
)
async def show_job(request: Request, job_id: JobId) -> Response:
    """Returns a job, and what it asks for."""
    client = own_pool(request).client
    async with asking_broker():
        record = await read_record(client, job_id)
        content = await read_content(client, record)
    return fresh_json(describe(record) | {"job": content})


@router.post(
    "/admin/jobs/{job_id:path}/cancel",
    summary="Cancel a job",
    responses=error_responses(ErrorResponse, {404: NO_JOB, 409: "The job has ended"}),
)
async def cancel_job(request: Request, job_id: JobId) -> Response:
    """Ends a job that waits, is scheduled or runs."""
    pool = own_pool(request)
    async with asking_broker():
        await read_record(pool.client, job_id)
        if not await records.cancel_job(pool, job_id):
            raise ApiError(409, "conflict", "The job has ended")
    return fresh_json({"id": job_id})


@router.post(
    "/admin/jobs/{job_id:path}/retry",
    summary="Try a dead job again",
    responses=error_responses(ErrorResponse, {404: NO_JOB, 409: "The job is not dead"}),
)
async def retry_job(request: Request, job_id: JobId) -> Response:
    """Submits a dead job again, with its id, as if it were new."""
    pool = own_pool(request)
    async with asking_broker():
        await read_record(pool.client, job_id)
        if not await records.retry_dead(pool, job_id):
            raise ApiError(409, "conflict", "Only a dead job can be tried again, and this one is not dead")
    return fresh_json({"id": job_id})


def describe(record: JobRecord) -> dict[str, Any]:
    return JobInfo(
        id=record.id,
        state=record.state,  # type: ignore[arg-type]
        kind=record.text("kind"),
        model=record.text("model"),
        tenant=record.text("tenant"),
        key_id=record.text("key_id"),
        service_class=record.text("service_class"),
        created_at=record.created_ms // 1000,
        not_before=record.number("not_before_ms") / 1000,
        ended_at=record.number("ended_ms") // 1000,
        status=record.number("status"),
        reason=record.text("reason"),
        error=record.text("error"),
        retries=record.number("retries"),
    ).model_dump()
