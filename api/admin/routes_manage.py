"""Admin routes: what `tokenfleet keys`, `tokenfleet jobs` and `tokenfleet webhooks` do. A key's text is in
the answer that makes it, and nowhere else.
"""

import contextlib
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query, Request
from starlette.responses import Response

from api.errors import ApiError, asking_broker
from api.http import body
from api.http.openapi import FLEET, TGI_ERRORS, ErrorResponse, Shape, answer, error_responses, json_body, only
from api.jobs import records
from api.jobs.listing import JobQuery, count_jobs, read_content, read_page, read_record
from api.jobs.scripts import JobRecord
from api.json import fresh_json
from api.requests.pool import Pool
from api.requests.service_terms import own_pool
from api.webhooks import StoredEvent, check_url, type_of
from common import api_keys
from common.api_keys import ApiKey, IssuedKey, KeyFields
from common.broker.lua import call_script
from common.broker.pool_client import ChangeRefused
from common.ids import EVENT_ID

FAULTS = {
    404: "There is none",
    409: "It has ended or is not dead, or the keys are in API_KEYS_FILE",
}
ERRORS = only(TGI_ERRORS, 401, 403, 422, 503) | error_responses(ErrorResponse, FAULTS)
router = APIRouter(responses=ERRORS, tags=[FLEET])

# --- keys ---------------------------------------------------------------------------------------------------


SHOWN_FIELDS = (
    *("key_id", "name", "tenant", "service_class", "weight", "max_concurrent", "requests_per_minute"),
    *("tokens_per_minute", "budget_tokens", "models", "adapters", "created_at", "expires_at", "revoked"),
    *("admin", "webhook"),
)
"""What people see of a key: neither its text nor the secret of its webhook."""


def describe_key(key: ApiKey, now_s: float) -> dict[str, Any]:
    """A key as people see it; 0 is no limit, and an empty list all names."""
    return {name: getattr(key, name) for name in SHOWN_FIELDS} | {"state": key.state(now_s)}


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
    except ChangeRefused as error:
        status, kind = (404, "not_found") if error.is_unknown else (409, "conflict")
        raise ApiError(status, kind, str(error)) from error


def respond_issued(pool: Pool, issued: IssuedKey) -> Response:
    return fresh_json(describe_key(issued.record, pool.client.clock.now_s()) | {"key": issued.text})


# --- jobs ---------------------------------------------------------------------------------------------------


JOB_TEXTS = ("kind", "model", "tenant", "key_id", "service_class", "reason", "error")


def describe_job(record: JobRecord) -> dict[str, Any]:
    """A job; `status`, `reason` and `error` are of one that has ended, as HTTP would answer it. Times are
    Unix times in s, 0 where there is none.
    """
    return {
        "id": record.id,
        "state": record.state,
        **{name: record.text(name) for name in JOB_TEXTS},
        "created_at": record.created_ms // 1000,
        "not_before": record.number("not_before_ms") / 1000,
        "ended_at": record.number("ended_ms") // 1000,
        "status": record.number("status"),
        "retries": record.number("retries"),
    }


MAX_LISTED_JOBS = 200
State = Literal["queued", "running", "scheduled", "done", "failed", "cancelled", "dead"]
JobId = Annotated[str, Path(description="Its `id`.", min_length=1, max_length=128)]
SHOWN_JOB = describe_job(JobRecord("night/3", {"kind": "chat"}, "live"))
JOB = Shape("JobDetails", {**SHOWN_JOB, "job": ({}, None)})
COUNTS = {"live": 1, "scheduled": 0, "dead": 0, "ended": 0}
JOBS = Shape(
    "JobList", {"jobs": [Shape("JobInfo", SHOWN_JOB)], "cursor": (None, "live:1:night/3"), "counts": COUNTS}
)


@router.get("/admin/jobs", summary="List jobs", responses=answer(JOBS))
async def list_jobs(
    request: Request,
    status: Annotated[State | None, Query(description="Jobs in this state.")] = None,
    tenant: Annotated[str, Query(description="Jobs of this tenant.", max_length=128)] = "",
    search: Annotated[str, Query(description="Jobs whose id has this text.", max_length=128)] = "",
    cursor: Annotated[str, Query(description="The `cursor` of the page before.", max_length=200)] = "",
    limit: Annotated[int, Query(ge=1, le=MAX_LISTED_JOBS, description="Most jobs.")] = 50,
) -> Response:
    """Returns jobs over Redis and of arq: live ones, then scheduled, dead, and ended ones. `cursor` is where
    the next page begins, null after the last one: a page may have fewer than `limit` jobs, even none, though
    others follow. `counts` has all jobs.
    """
    client = own_pool(request).client
    async with asking_broker():
        page = await read_page(client, JobQuery(status or "", tenant, search), cursor, limit)
        counts = await count_jobs(client)
    return fresh_json({"jobs": [*map(describe_job, page.records)], "cursor": page.cursor, "counts": counts})


@router.get("/admin/jobs/{job_id:path}", summary="Show a job", responses=answer(JOB))
async def show_job(request: Request, job_id: JobId) -> Response:
    """Returns a job, and what it asks for: null of one that is not kept, as it has ended and is not dead."""
    client = own_pool(request).client
    async with asking_broker():
        record = await read_record(client, job_id)
        content = await read_content(client, record)
    return fresh_json(describe_job(record) | {"job": content})


@router.post("/admin/jobs/{job_id:path}/cancel", summary="Cancel a job")
async def cancel_job(request: Request, job_id: JobId) -> Response:
    """Ends a job that waits, is scheduled or runs."""
    pool = own_pool(request)
    async with asking_broker():
        await read_record(pool.client, job_id)
        if not await records.cancel_job(pool, job_id):
            raise ApiError(409, "conflict", "The job has ended")
    return fresh_json({"id": job_id})


@router.post("/admin/jobs/{job_id:path}/retry", summary="Try a dead job again")
async def retry_job(request: Request, job_id: JobId) -> Response:
    """Submits a dead job again, with its id, as if it were new."""
    pool = own_pool(request)
    async with asking_broker():
        await read_record(pool.client, job_id)
        if not await records.retry_dead(pool, job_id):
            raise ApiError(409, "conflict", "Only a dead job can be tried again, and this one is not dead")
    return fresh_json({"id": job_id})


# --- webhooks -----------------------------------------------------------------------------------------------


def describe_event(event: StoredEvent, state: str, at_ms: float) -> dict[str, Any]:
    """An event without its secret. `object_id` is what has ended; `at` is when it is sent next, or since when
    it is given up (Unix time, s); `said` is what the receiver answered last, or why it did not.
    """
    try:
        webhook = event.webhook
        kind, object_id, url = type_of(event, webhook), webhook.object_id, webhook.url
    except ValueError:  # it cannot be read
        kind = object_id = url = ""
    return {
        "id": event.id,
        "type": kind,
        "object_id": object_id,
        "url": url,
        "state": state,
        "created_at": event.number("made_ms") // 1000,
        "at": int(at_ms // 1000),
        "failures": event.number("failures"),
        "said": event.text("said"),
    }


MAX_LISTED_EVENTS = 1000
EventState = Literal["waiting", "dead"]
EVENT = Shape("EventInfo", describe_event(StoredEvent("evt_5f0f8c0e", {}), "waiting", 0))
EVENTS = Shape("EventList", {"events": [EVENT], "total": 1})


@router.get("/admin/webhooks", summary="List events of webhooks", responses=answer(EVENTS))
async def list_events(
    request: Request,
    state: Annotated[EventState, Query(description="Not delivered yet, or given up.")] = "waiting",
    limit: Annotated[int, Query(ge=1, le=MAX_LISTED_EVENTS, description="Most events.")] = 100,
) -> Response:
    """Returns events that wait to be delivered, the next one first, or that were given up, the oldest first;
    `total` is the number of all in this state.
    """
    client = own_pool(request).client
    key = client.keys.dead_webhooks if state == "dead" else client.keys.webhooks
    async with asking_broker():
        found = await client.redis.zrange(key, 0, limit - 1, withscores=True)
        async with client.redis.pipeline(transaction=False) as pipe:
            pipe.zcard(key)
            for event_id, _ in found:
                pipe.hgetall(client.keys.webhook_event(event_id.decode()))
            total, *hashes = await pipe.execute()
    events = [
        describe_event(StoredEvent(event_id.decode(), fields), state, at_ms)
        for (event_id, at_ms), fields in zip(found, hashes, strict=True)
        if fields
    ]
    return fresh_json({"events": events, "total": total})


@router.post("/admin/webhooks/{event_id}/retry", summary="Send an event again")
async def retry_event(request: Request, event_id: Annotated[str, Path(description="Its `id`.")]) -> Response:
    """Sends an event at once that waits or was given up, and tries for as long as if it were new."""
    pool = own_pool(request)
    is_there = False
    if EVENT_ID.fullmatch(event_id):
        async with asking_broker():
            retry = call_script("retry_webhook", bool, pool.client.keys, args={"event_id": event_id})
            is_there = await pool.client.run(retry)
    if not is_there:
        raise ApiError(404, "not_found", "No event with this id waits or was given up")
    return fresh_json({"id": event_id, "state": "waiting"})
