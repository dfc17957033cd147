"""Admin routes: what `tokenfleet keys` and `tokenfleet jobs` do. A key's text is in the answer that makes it,
and nowhere else.
"""

import contextlib
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

import orjson
from fastapi import APIRouter, Path, Query, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from api.errors import ApiError, asking_broker, quoted
from api.http import body
from api.http.openapi import FLEET, TGI_ERRORS, ErrorResponse, Shape, answer, error_responses, json_body, only
from api.jobs import runner
from api.jobs.scripts import ENDED, LIVE
from api.json import fresh_json
from api.requests.on_pool import own_pool
from api.requests.pool import Pool
from api.webhooks import check_url
from common import api_keys
from common.api_keys import ApiKey, IssuedKey, KeyChangeError, KeyFields
from common.broker.pool_client import PoolClient
from common.ids import JOB_ID

FAULTS = {
    404: "There is none",
    409: "It has ended, or the keys are in API_KEYS_FILE",
}
ERRORS = only(TGI_ERRORS, 401, 403, 422, 503) | error_responses(ErrorResponse, FAULTS)
router = APIRouter(responses=ERRORS, tags=[FLEET])

# --- keys ---------------------------------------------------------------------------------------------------


def describe_key(key: ApiKey, now_s: float) -> dict[str, Any]:
    """A key without its text; 0 is no limit, and an empty list all names."""
    return {
        "key_id": key.key_id,
        "name": key.name,
        "tenant": key.tenant,
        "state": key.state(now_s),
        "service_class": key.service_class,
        "weight": key.weight,
        "max_concurrent": key.max_concurrent,
        "requests_per_minute": key.requests_per_minute,
        "tokens_per_minute": key.tokens_per_minute,
        "budget_tokens": key.budget_tokens,
        "models": key.models,
        "adapters": key.adapters,
        "created_at": key.created_at,
        "expires_at": key.expires_at,
        "revoked": key.revoked,
        "admin": key.admin,
        "webhook": key.webhook,
    }


SHOWN_KEY = describe_key(ApiKey("key_5f0f8c0e", "", tenant="acme", name="reports"), 0)
KEY = Shape("KeyInfo", SHOWN_KEY)
NEW_KEY = Shape("NewKey", {**SHOWN_KEY, "key": "tf-…"})
KEYS = Shape("KeyList", {"keys": [KEY]})
EXAMPLE = {"name": "reports", "tenant": "acme", "requests_per_minute": 60}
KeyId = Annotated[str, Path(description="Its `key_id`.")]


@router.get("/admin/keys", summary="List API keys", responses=answer(KEYS))
async def list_keys(request: Request) -> Response:
    """Returns all keys, the oldest first, revoked and expired ones, too."""
    pool = checked_pool(request)
    if pool.settings.api_keys_file:
        known = pool.keys.by_id
    else:
        async with asking_broker():
            known = await api_keys.read_keys(pool.client)
    now_s = pool.client.clock.now_s()
    return fresh_json({"keys": [describe_key(key, now_s) for key in known.values()]})


@router.post(
    "/admin/keys",
    summary="Add an API key",
    openapi_extra=json_body(KeyFields, EXAMPLE),
    responses=answer(NEW_KEY),
)
async def create_key(request: Request) -> Response:
    """Adds a key, and returns it with its text. From the first one on every request needs a key."""
    async with changing_keys(request) as pool:
        fields = await body.read(request, KeyFields, pool.settings.payload_limit)
        if fields.webhook:
            check_url(fields.webhook, pool.settings, "webhook")
        async with asking_broker():
            return respond_issued(pool, await api_keys.add_key(pool.client, fields))


@router.post("/admin/keys/{key_id}/revoke", summary="Revoke an API key", responses=answer(KEY))
async def revoke(request: Request, key_id: KeyId) -> Response:
    """Ends a key for ever. Gateways refuse it within seconds, and its running requests end."""
    async with changing_keys(request) as pool, asking_broker():
        revoked = await api_keys.revoke_key(pool.client, key_id)
        return fresh_json(describe_key(revoked, pool.client.clock.now_s()))


@router.post("/admin/keys/{key_id}/rotate", summary="Give an API key another text", responses=answer(NEW_KEY))
async def rotate(request: Request, key_id: KeyId) -> Response:
    """Returns the key with its new text; gateways refuse the old one within seconds. Its running requests go
    on.
    """
    async with changing_keys(request) as pool, asking_broker():
        return respond_issued(pool, await api_keys.rotate_key(pool.client, key_id))


def checked_pool(request: Request) -> Pool:
    """The gateway's own pool. Raises ApiError (403) while requests need no key: then nobody is an admin."""
    pool = own_pool(request)
    if pool.keys.is_open:
        why = "There is no admin yet: set API_KEY, or run `tokenfleet keys add --admin`"
        raise ApiError(403, "forbidden", why)
    return pool


@contextlib.asynccontextmanager
async def changing_keys(request: Request) -> AsyncIterator[Pool]:
    """The gateway's own pool, to change its keys. Raises ApiError: 403 as `checked_pool`; 409 if the keys are
    in a file, or the change is refused; 404 for an unknown key.
    """
    pool = checked_pool(request)
    if pool.settings.api_keys_file:
        raise ApiError(409, "conflict", "The API keys of this fleet are in API_KEYS_FILE: change that file")
    try:
        yield pool
    except KeyChangeError as error:
        status, kind = (404, "not_found") if error.is_unknown else (409, "conflict")
        raise ApiError(status, kind, str(error)) from error


def respond_issued(pool: Pool, issued: IssuedKey) -> Response:
    return fresh_json(describe_key(issued.record, pool.client.clock.now_s()) | {"key": issued.text})


# --- jobs ---------------------------------------------------------------------------------------------------


MAX_LISTED = 1000
"""Jobs of one answer; of live ones and of those that have ended as many are looked at, the newest ones."""
JobId = Annotated[str, Path(description="Its `id`.", min_length=1, max_length=128)]


class ListedJobs(BaseModel):
    """Which jobs are listed."""

    model_config = ConfigDict(extra="forbid")

    status: Literal["queued", "running", "done", "failed", "cancelled"] | None = Field(
        default=None, description="Jobs in this state."
    )
    limit: int = Field(default=50, ge=1, le=MAX_LISTED, description="Most jobs.")


def describe_job(job_id: str, fields: dict[bytes, bytes], has_started: bool) -> dict[str, Any]:
    """A job from its record: one without an end runs if its turn has come. `status`, `reason` and `error` are
    of one that has ended, as HTTP would answer it. Times are Unix times in s, 0 where there is none.
    """
    text = {name.decode(): value.decode(errors="replace") for name, value in fields.items()}
    return {
        "id": job_id,
        "state": text.get("state", "running" if has_started else "queued"),
        **{name: text.get(name, "") for name in ("kind", "model", "tenant", "key_id", "service_class")},
        "created_at": int(text.get("first_entry", "0").partition("-")[0]) // 1000,
        "ended_at": int(text.get("ended_ms", "0")) // 1000,
        "status": int(text.get("status", "0")),
        **{name: text.get(name, "") for name in ("reason", "error")},
    }


SHOWN_JOB = describe_job("night/3", {b"kind": b"chat"}, True)
JOB = Shape("JobDetails", {**SHOWN_JOB, "job": ({}, None)})
JOBS = Shape("JobList", {"jobs": [Shape("JobInfo", SHOWN_JOB)], "counts": {"live": 1, "ended": 0}})


@router.get("/admin/jobs", summary="List jobs", responses=answer(JOBS))
async def list_jobs(request: Request, asked: Annotated[ListedJobs, Query()]) -> Response:
    """Returns jobs over Redis and of arq: live ones, then those that have ended, the newest first. `counts`
    has all jobs.
    """
    client, found, counts = own_pool(request).client, list[dict[str, Any]](), dict[str, int]()
    async with asking_broker():
        for set_name in (LIVE, ENDED):
            key = client.keys.job_set(set_name)
            counts[set_name] = await client.redis.zcard(key)
            members = await client.redis.zrange(key, 0, MAX_LISTED - 1, desc=True)
            found += await read_jobs(client, [member.decode() for member in members])
    shown = [job for job in found if asked.status in (None, job["state"])]
    return fresh_json({"jobs": shown[: asked.limit], "counts": counts})


@router.get("/admin/jobs/{job_id:path}", summary="Show a job", responses=answer(JOB))
async def show_job(request: Request, job_id: JobId) -> Response:
    """Returns a job, and what it asks for: null of one that has ended."""
    client = own_pool(request).client
    async with asking_broker():
        job = await read_job(client, job_id)
        entry = await client.redis.hget(client.keys.job_record(job_id), "entry")  # type: ignore[misc]
        found = await client.redis.xrange(client.keys.submit, entry, entry) if entry else []
    content = next((orjson.loads(fields[b"job"]) for _, fields in found), None)
    return fresh_json(job | {"job": content})


@router.post("/admin/jobs/{job_id:path}/cancel", summary="Cancel a job")
async def cancel_job(request: Request, job_id: JobId) -> Response:
    """Ends a job that waits or runs."""
    pool = own_pool(request)
    async with asking_broker():
        await read_job(pool.client, job_id)
        if not await runner.cancel_job(pool, job_id):
            raise ApiError(409, "conflict", "The job has ended")
    return fresh_json({"id": job_id})


async def read_job(client: PoolClient, job_id: str) -> dict[str, Any]:
    """Raises ApiError (404)."""
    found = await read_jobs(client, [job_id] if JOB_ID.fullmatch(job_id) else [])
    if not found:
        raise ApiError(404, "not_found", f"There is no job {quoted(job_id)}, or it has ended long ago")
    return found[0]


async def read_jobs(client: PoolClient, job_ids: list[str]) -> list[dict[str, Any]]:
    """The jobs that have a record."""
    async with client.redis.pipeline(transaction=False) as pipe:
        for job_id in job_ids:
            pipe.hgetall(client.keys.job_record(job_id))
            pipe.hexists(client.keys.job(job_id), "choices")
        replies = await pipe.execute()
    records = zip(job_ids, replies[::2], replies[1::2], strict=True)
    return [describe_job(job_id, fields, started) for job_id, fields, started in records if fields]
