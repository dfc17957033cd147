"""Admin routes: what `tokenfleet keys`, `tokenfleet jobs` and `tokenfleet webhooks` do. A key's text is in
the answer that makes it, and nowhere else.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter, Path, Query, Request
from pydantic import Field
from starlette.responses import PlainTextResponse, Response

from api.errors import ApiError, asking_broker, invalid, quoted, refuse, unavailable
from api.http import body
from api.http.openapi import (
    FLEET,
    OPENAI_ERRORS,
    TGI_ERRORS,
    ErrorResponse,
    Shape,
    answer,
    error_responses,
    json_body,
    only,
)
from api.jobs import records
from api.jobs.records import JobQuery, JobRecord, count_jobs, read_content, read_page, read_record
from api.json import fresh_json
from api.requests.fields import Strict
from api.requests.pool import Pool
from api.requests.registry import PoolRegistry
from api.requests.service_terms import own_pool, pools_of
from api.webhooks import StoredEvent, check_url, type_of
from common import api_keys
from common.adapter_registry import AdapterRegistry, change_registry
from common.adapters import LOADING, AdapterFault, HeldAdapters, PoolAdapter, find_adapter
from common.api_keys import ApiKey, IssuedKey, KeyFields
from common.broker.lua import call_script
from common.broker.pool_client import ChangeRefused
from common.ids import ADAPTER_NAME, EVENT_ID
from common.settings.fields import AdapterSource

log = logging.getLogger(__name__)

FAULTS = {
    404: "There is none",
    409: "It has ended or is not dead",
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


SHOWN_KEY = describe_key(
    ApiKey("key_5f0f8c0e", "", tenant="acme", name="reports", models=["SmolLM2"], adapters=["sql"]), 0
)
KEY = Shape("KeyInfo", SHOWN_KEY)
NEW_KEY = Shape("NewKey", {**SHOWN_KEY, "key": "tf-…"})
KEYS = Shape("KeyList", {"keys": [KEY]})
EXAMPLE = {"name": "reports", "tenant": "acme", "requests_per_minute": 60}
KeyId = Annotated[str, Path(description="Its `key_id`.")]


@router.get("/admin/keys", summary="List API keys", responses=answer(KEYS))
async def list_keys(request: Request) -> Response:
    """Returns all keys, the oldest first, revoked and expired ones, too."""
    pool = checked_pool(request)
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
        return respond_issued(pool, await api_keys.add_key(pool.client, fields))


@router.post("/admin/keys/{key_id}/revoke", summary="Revoke an API key", responses=answer(KEY))
async def revoke(request: Request, key_id: KeyId) -> Response:
    """Ends a key for ever. Gateways refuse it within seconds, and its running requests end."""
    async with changing_keys(request) as pool:
        revoked = await api_keys.revoke_key(pool.client, key_id)
        return fresh_json(describe_key(revoked, pool.client.clock.now_s()))


@router.post("/admin/keys/{key_id}/rotate", summary="Give an API key another text", responses=answer(NEW_KEY))
async def rotate(request: Request, key_id: KeyId) -> Response:
    """Returns the key with its new text; gateways refuse the old one within seconds. Its running requests go
    on.
    """
    async with changing_keys(request) as pool:
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
    """The gateway's own pool, to change its keys. Raises ApiError: 403 as `checked_pool`; 409 if the change
    is refused; 404 for an unknown key.
    """
    pool = checked_pool(request)
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
    found, after = await read_page(client, JobQuery(status or "", tenant, search), cursor, limit)
    counts = await count_jobs(client)
    return fresh_json({"jobs": [*map(describe_job, found)], "cursor": after, "counts": counts})


@router.get("/admin/jobs/{job_id:path}", summary="Show a job", responses=answer(JOB))
async def show_job(request: Request, job_id: JobId) -> Response:
    """Returns a job, and what it asks for: null of one that is not kept, as it has ended and is not dead."""
    client = own_pool(request).client
    record = await read_record(client, job_id)
    content = await read_content(client, record)
    return fresh_json(describe_job(record) | {"job": content})


CHANGES = {
    "cancel": (records.cancel_job, "The job has ended"),
    "retry": (records.retry_dead, "Only a dead job can be tried again, and this one is not dead"),
}
"""What may be done to a job, and why it is not."""


@router.post("/admin/jobs/{job_id:path}/cancel", name="cancel_job", summary="Cancel a job")
@router.post("/admin/jobs/{job_id:path}/retry", name="retry_job", summary="Try a dead job again")
async def change_job(request: Request, job_id: JobId) -> Response:
    """A cancel ends a job that waits, is scheduled or runs. A dead job that is tried again is submitted with
    its id, as if it were new.
    """
    pool, (change, why_not) = own_pool(request), CHANGES[request.url.path.rpartition("/")[2]]
    await read_record(pool.client, job_id)
    if not await change(pool, job_id):
        raise ApiError(409, "conflict", why_not)
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
        retry = call_script("retry_webhook", bool, pool.client.keys, args={"event_id": event_id})
        is_there = await pool.client.run(retry)
    if not is_there:
        raise ApiError(404, "not_found", "No event with this id waits or was given up")
    return fresh_json({"id": event_id, "state": "waiting"})


# --- adapters -----------------------------------------------------------------------------------------------


LOAD_TIMEOUT_S = 600.0
LOOK_S = 0.1


def describe_adapter(holders: Mapping[str, HeldAdapters], adapter: PoolAdapter) -> dict[str, Any]:
    """What people see of an adapter. `state` is `ready`; `loading` until all workers have it, `leaving` while
    the last requests with it run. `refused` has the causes of workers that cannot serve it.
    """
    return {
        **{
            name: getattr(adapter, name) for name in ("name", "path", "state", "rank", "base_model", "digest")
        },
        "added_at": adapter.added_ms // 1000,
        "num_workers": sum(adapter.key in held.loaded for held in holders.values()),
        "refused": {name: why for name, held in holders.items() if (why := held.why_not(adapter))},
    }


async def load_adapter(pools: PoolRegistry, source: AdapterSource, in_place: bool) -> None:
    """Load an adapter on all workers of the gateway's own pool. If one of them refuses it, all unload it,
    unless requests got it before. Raises ApiError.

    Args:
        in_place: it may take the place of another one of its name, whose live requests go on with that one.
    """

    def is_loading(one: PoolAdapter) -> bool:  # one that is loaded again is ready, and stays
        return one.key == adapter.key and one.state == LOADING

    pool = pools.own
    refuse((pools.is_model(source.name), f"`lora_name`: {quoted(source.name)} is the name of a model"))
    await pool.check_admission()
    try:
        adapter = await asyncio.to_thread(find_adapter, source)
    except AdapterFault as fault:
        raise invalid(f"`lora_path`: {fault}") from fault
    check_rank(pool, adapter)
    known = await pool.find_adapter(adapter.name)
    if known and in_place and known.key == adapter.key and not known.failure and all_have(pool, adapter):
        return
    try:
        await change_adapters(pool, lambda found: found.with_loading(adapter, in_place))
        try:
            async with asyncio.timeout(LOAD_TIMEOUT_S):
                while not all_have(pool, adapter):
                    await asyncio.sleep(LOOK_S)
                    await pool.workers.refresh_unless_fresh()
                    await pool.adapters.refresh_unless_fresh()
                    check_loading(pool, adapter)
            await change_adapters(pool, lambda found: found.with_ready(adapter.key))
        except BaseException:
            await asyncio.shield(change_adapters(pool, lambda found: found.without(is_loading)))
            raise
    except TimeoutError as error:
        raise unavailable(f"not all workers have loaded it within {LOAD_TIMEOUT_S:.0f} s") from error
    except ChangeRefused as error:
        raise ApiError(400, "validation", f"The adapter cannot be loaded: {error}", "lora_name") from error
    await pool.adapters.refresh()
    log.info("the adapter %s is loaded from %s", adapter.key, adapter.path)


async def change_adapters(pool: Pool, changed: Callable[[AdapterRegistry], AdapterRegistry]) -> None:
    """Change the registry of adapters. Raises ApiError (503), ChangeRefused."""
    async with asking_broker():
        await change_registry(pool.client, changed)


async def unload_adapter(pool: Pool, name: str) -> None:
    """Give requests an adapter no more. Raises ApiError: 404 if there is none."""

    def without(found: AdapterRegistry) -> AdapterRegistry:
        after = found.without(lambda one: one.name == name)
        if after == found:
            raise ChangeRefused(f"There is no adapter {quoted(name)}", True)
        return after

    try:
        await change_adapters(pool, without)
    except ChangeRefused as error:
        raise ApiError(404 if error.is_unknown else 409, "not_found", str(error), "lora_name") from error
    await pool.adapters.refresh()
    log.info("the adapter %s is unloaded", name)


# --- checks -------------------------------------------------------------------------------------------------


def check_rank(pool: Pool, adapter: PoolAdapter) -> None:
    """Raises ApiError: 422 if the workers serve no adapters, or none of this rank; 503 without a worker. An
    adapter that was made for another model may fit all the same.
    """
    (_, most), settings = pool.workers.adapter_room, pool.settings
    if not pool.workers.num_ready:
        raise unavailable("no worker is ready: while the model sleeps, no adapter is loaded")
    refuse(
        (not pool.workers.holders, "The workers of this pool serve no adapters", "lora_name"),
        (adapter.rank > most, f"`lora_path`: its rank is {adapter.rank}; MAX_LORA_RANK is {most}"),
    )
    if adapter.base_model and adapter.base_model not in (*settings.served_model_name, settings.model_id):
        log.warning("the adapter %s was made for the model %s", adapter.name, adapter.base_model)


def all_have(pool: Pool, adapter: PoolAdapter) -> bool:
    """Whether all ready workers have loaded an adapter."""
    holders = pool.workers.holders.values()
    return bool(holders) and all(adapter.key in held.loaded for held in holders)


def check_loading(pool: Pool, adapter: PoolAdapter) -> None:
    """Raises ApiError (422) if an adapter that is being loaded has ended engines, or a worker refuses it;
    ChangeRefused if it was unloaded.
    """
    registry = pool.adapters.registry
    known = registry.adapters.get(adapter.key)
    if known and known.added_ms == adapter.added_ms:
        registry.with_ready(known.key)  # raises
        refuse((bool(known.failure), f"`lora_path`: {known.failure}"))
    for incarnation, held in pool.workers.holders.items():
        if why := held.why_not(adapter):
            raise invalid(f"`lora_path`: the worker {incarnation} refuses it: {why}")


# --- routes adapters ----------------------------------------------------------------------------------------


adapters_router = APIRouter(responses=only(OPENAI_ERRORS, 400, 401, 403, 404, 413, 415, 503), tags=[FLEET])
Change = TypeVar("Change", bound=Strict)
LOAD_EXAMPLE = {"lora_name": "sql", "lora_path": "/adapters/sql"}


class LoadRequest(Strict):
    """The body of /v1/load_lora_adapter."""

    lora_name: str = Field(
        pattern=f"^{ADAPTER_NAME.pattern}$",
        description="The name by which requests ask for it, as `model` or `adapter_id`.",
    )
    lora_path: str = Field(
        min_length=1,
        max_length=4096,
        description="A folder that all workers can read, or a hub id, perhaps with `@revision`.",
    )
    load_inplace: bool | None = Field(
        default=None, description="Take the place of an adapter of this name. Default: false."
    )


class UnloadRequest(Strict):
    """The body of /v1/unload_lora_adapter."""

    lora_name: str
    lora_int_id: int | None = Field(default=None, description="Ignored.")


ADAPTER = Shape("AdapterInfo", describe_adapter({}, PoolAdapter("sql", "/adapters/sql", "5f0f8c0e")))
ADAPTERS = Shape("AdapterList", {"adapters": [ADAPTER], "num_workers": 2, "may_change": True})


@adapters_router.get("/admin/adapters", summary="List LoRA adapters", responses=answer(ADAPTERS))
async def list_adapters(request: Request) -> Response:
    """Returns the adapters of the pool, the oldest first, with those that are being loaded and unloaded, and
    the number of workers that serve adapters.
    """
    pool = own_pool(request)
    await pool.adapters.refresh_unless_fresh()
    found = sorted(pool.adapters.registry.adapters.values(), key=lambda one: (one.added_ms, one.name))
    adapters = [describe_adapter(pool.workers.holders, one) for one in found]
    num_workers, may_change = len(pool.workers.holders), why_not_changed(pool) == ""
    return fresh_json({"adapters": adapters, "num_workers": num_workers, "may_change": may_change})


@adapters_router.post(
    "/v1/load_lora_adapter", summary="Load a LoRA adapter", openapi_extra=json_body(LoadRequest, LOAD_EXAMPLE)
)
async def load_lora_adapter(request: Request) -> Response:
    """Loads an adapter on every worker of the pool, also on those that start later, and answers once all
    have it. If one refuses it, none keeps it.
    """
    parsed = await read_change(request, LoadRequest)
    source = AdapterSource(parsed.lora_name, parsed.lora_path)
    await load_adapter(pools_of(request), source, bool(parsed.load_inplace))
    return PlainTextResponse(f"Success: LoRA adapter '{parsed.lora_name}' added successfully.")


@adapters_router.post(
    "/v1/unload_lora_adapter",
    summary="Unload a LoRA adapter",
    openapi_extra=json_body(UnloadRequest, {"lora_name": "sql"}),
)
async def unload_lora_adapter(request: Request) -> Response:
    """Refuses new requests for an adapter. Those that run or wait are finished with it, then workers unload
    it.
    """
    parsed = await read_change(request, UnloadRequest)
    await unload_adapter(own_pool(request), parsed.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{parsed.lora_name}' removed successfully.")


async def read_change(request: Request, shape: type[Change]) -> Change:
    """The body of a change. Raises ApiError: 403 where adapters may not be changed, and those of bodies."""
    pool = own_pool(request)
    if why := why_not_changed(pool):
        raise ApiError(403, "forbidden", why)
    return await body.read(request, shape, pool.settings.payload_limit)


def why_not_changed(pool: Pool) -> str:
    """Why adapters may not be changed by requests; empty if they may, by an admin where there are keys."""
    allowed = pool.settings.allow_runtime_lora_updating
    if allowed is False:
        return "Adapters are not changed by requests here (ALLOW_RUNTIME_LORA_UPDATING)"
    if allowed is None and pool.keys.is_open:
        return "There is no admin yet: set API_KEY, or allow it to all with ALLOW_RUNTIME_LORA_UPDATING"
    return ""
