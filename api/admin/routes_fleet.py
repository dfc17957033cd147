"""GET /fleet: the processes of a pool, from their heartbeats in Redis, and their health. Every gateway
returns the same list. GET /fleet/requests/{id}: the timeline of one request, from the stream that the batcher
writes.
"""

import asyncio
import contextlib
import dataclasses
import logging
import os
import signal
import socket
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from importlib.metadata import version
from typing import Annotated, Any
from urllib.parse import urlsplit

from fastapi import APIRouter, Path, Request
from starlette.background import BackgroundTask
from starlette.responses import PlainTextResponse, Response

from api.admin.routes_manage import describe_adapter
from api.admin.routes_usage import metric_values
from api.errors import ApiError, cut, quoted
from api.http.auth import is_loopback
from api.http.openapi import FLEET, HEALTH, TGI_ERRORS, ErrorResponse, RequestId, error_responses, only
from api.json import fresh_json, to_json
from api.requests.metrics import fit_buckets, read_months
from api.requests.monitors import SILENT_S, BatcherMonitor
from api.requests.pool import Pool
from api.requests.service_terms import own_pool, pools_of
from common.adapters import AdapterLoad
from common.broker.client import ERRORS
from common.broker.keys import SLEEPER, STARTING
from common.broker.pool_client import PoolClient
from common.messages.codec import WireError, decode
from common.messages.events import Timeline
from common.messages.plan import WorkerCapacity
from common.metrics import catalogue
from common.metrics.catalogue import Labels, Metric
from common.metrics.exposition import CONTENT_TYPE, Gauges, Values, render
from common.process.logs import plural

log = logging.getLogger(__name__)

WORKER_FIGURES = ("rows", "max_rows", "blocks", "tokens", "step", "known", "cached")
CAPACITY_FIELDS = ("num_blocks", "block_size", "max_batch_prefill_tokens", "device", "dtype")
FIGURES = {
    "gateway": ("streams",),
    "batcher": ("waiting", "rows"),
    "worker": WORKER_FIGURES,
    STARTING: (*WORKER_FIGURES, "num_blocks"),
    SLEEPER: (*WORKER_FIGURES, "num_blocks", "swap_ms"),
}
"""Kinds of processes → the numbers in their heartbeats; a missing number is 0."""
ASLEEP = "asleep"
"""State of a worker that serves other models, and this one when it is asked for."""
REFUSED = "refused"
UNFIT = ("silent", REFUSED)
"""States of workers that do not answer the batcher, or have another model than the workers of the pool."""
BROKER = "broker"
"""Kind and id of the broker, of which a pool has one."""


@dataclass(frozen=True, slots=True)
class ProcessList:
    """The live processes of a pool.

    Attributes:
        time_s: the broker's clock.
        num_live: number of requests, waiting and running.
        processes: objects of `GET /fleet`, sorted by kind and id.
    """

    time_s: float
    num_live: int
    processes: list[dict[str, Any]] = field(default_factory=list)

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [process for process in self.processes if process["kind"] == kind]

    @property
    def active_batcher(self) -> dict[str, Any] | None:
        return next((batcher for batcher in self.of_kind("batcher") if batcher["active"]), None)

    @property
    def requests(self) -> dict[str, int]:
        """Numbers of requests by state, from the active batcher; without one, all requests wait."""
        active = self.active_batcher or {"waiting": self.num_live, "rows": 0}
        return {"live": self.num_live, "waiting": active["waiting"], "running": active["rows"]}


async def list_processes(client: PoolClient, monitor: BatcherMonitor) -> ProcessList:
    """The processes that are live now. Raises the broker's errors.

    The monitor gets the heartbeat of the batcher that holds the lease, and decides whether it is active.
    """
    async with client.redis.pipeline(transaction=False) as pipe:
        pipe.time()
        pipe.zrange(client.keys.workers, 0, -1, withscores=True)
        pipe.zrange(client.keys.processes, 0, -1, withscores=True)
        pipe.xlen(client.keys.requests)
        pipe.get(client.keys.batcher)
        pipe.info()
        pipe.hmget(client.keys.state, [*UNFIT])
        (seconds, microseconds), workers, others, num_live, holder, info, unfit = await pipe.execute()
    seen = [(*member.decode().split(":", 1), seen_ms) for member, seen_ms in others]
    seen += [("worker", name.decode(), seen_ms) for name, seen_ms in workers]
    async with client.redis.pipeline(transaction=False) as pipe:
        for kind, name, _ in seen:
            pipe.hgetall(client.keys.process(kind, name))
        hashes = await pipe.execute()
    time_s = seconds + microseconds / 1e6
    holder_name = (holder or b"").decode()
    monitor.update(holder_name, dict(others).get(f"batcher:{holder_name}".encode()), time_s * 1000)
    broker = {"kind": BROKER, "id": BROKER, "host": "", "pid": info.get("process_id", 0), "state": "ready"}
    figures = {
        "age_s": 0.0,
        "clients": info.get("connected_clients", 0),
        "memory_bytes": info.get("used_memory", 0),
        "commands_per_s": info.get("instantaneous_ops_per_sec", 0),
    }
    processes: dict[str, dict[str, Any]] = {BROKER: broker | figures}
    for (kind, name, seen_ms), heartbeat in zip(seen, hashes, strict=True):
        common = {"kind": kind, "id": name, "age_s": round(max(0.0, time_s - seen_ms / 1000), 3)}
        if heartbeat and (own := render_process(kind, heartbeat)) is not None:
            processes[name] = common | own
    for state, names in zip(UNFIT, unfit, strict=True):
        for name in (names or b"").decode().split():
            if name in processes:
                processes[name]["state"] = state
    for name, process in processes.items():
        if process["kind"] == "batcher":
            late = name == holder_name or process["age_s"] > SILENT_S  # its last heartbeat expires soon
            active = name == monitor.active
            process |= {"state": "active" if active else "silent" if late else "standby", "active": active}
    return ProcessList(
        time_s, num_live, sorted(processes.values(), key=lambda process: (process["kind"], process["id"]))
    )


def render_process(kind: str, heartbeat: dict[bytes, bytes]) -> dict[str, Any] | None:
    """The object of a process in `GET /fleet`; None if its heartbeat cannot be decoded."""
    host, state = heartbeat.get(b"host", b"").decode(), heartbeat.get(b"state", b"").decode()
    figures = {name: int(heartbeat.get(name.encode(), b"0")) for name in ("pid", *FIGURES.get(kind, ()))}
    process: dict[str, Any] = {"host": host, "state": state or "ready"} | figures
    if kind == SLEEPER:  # while it wakes, and while it is awake here, it has another heartbeat
        kept_in = {"kind": "worker", "kept_in": heartbeat.get(b"kept_in", b"").decode()}
        return process | kept_in if process["state"] == ASLEEP else None
    if kind == STARTING:
        return process | {"kind": "worker", "state": "starting"}
    if kind == "worker":
        try:
            capacity = decode(WorkerCapacity, heartbeat[b"capacity"])
        except (WireError, KeyError) as error:
            log.error("a worker's heartbeat cannot be decoded: %s", error)
            return None
        process |= {name: getattr(capacity, name) for name in CAPACITY_FIELDS}
    return process


async def list_models(client: PoolClient, pools: Collection[str]) -> list[dict[str, Any]]:
    """The objects `models` of `GET /fleet`: of each pool what its sleeping and waking workers say: `awake`,
    `waking` or `asleep`, where the weights are, and what the last swap from there took (0: not known). Raises
    the broker's errors.
    """
    found = []
    for pool in pools:
        own = client.of_pool(pool)
        waiting = await own.redis.hget(own.keys.state, "waiting")  # type: ignore[misc]
        workers = []
        for name in await own.processes(SLEEPER):
            if known := await own.redis.hgetall(own.keys.sleeper(name)):  # type: ignore[misc]
                texts = {one: known.get(one.encode(), b"").decode() for one in ("state", "kept_in")}
                workers.append(texts | {"swap_s": int(known.get(b"swap_ms", b"0")) / 1000})
        found.append({"pool": pool, "waiting": int(waiting or 0), "workers": workers})
    return found


def judge_processes(listed: ProcessList, num_workers: int) -> tuple[str, str]:
    """`good`, `warn` or `bad`, and why; there should be `num_workers` at least."""
    workers = listed.of_kind("worker")
    num_ready = sum(is_ready(worker) for worker in workers)
    expected = max(num_workers, len(workers))
    if not num_ready and any(worker["state"] == ASLEEP for worker in workers):
        return "good", f"{plural(len(workers), 'worker')}, asleep until a request comes"
    if not num_ready:
        return "bad", "no worker is ready"
    if listed.active_batcher is None:
        return "warn", "no batcher is active"
    if num_ready < expected:
        return "warn", f"{num_ready} of {expected} workers ready"
    return "good", f"{plural(num_ready, 'worker')} ready"


def is_ready(worker: dict[str, Any]) -> bool:
    return bool(worker["state"] == "ready" and worker["age_s"] <= SILENT_S)


# --- routes fleet -------------------------------------------------------------------------------------------


KILL_ERRORS = error_responses(
    ErrorResponse,
    {403: "The client may not, or the process is not one of this fleet", 404: "No such process"},
)
COMMANDS = {"gateway": "tokenfleet api", "broker": "valkey-server"}
"""Kinds of processes whose command lines do not have their name."""
router = APIRouter(responses=only(TGI_ERRORS, 401, 403, 503), tags=[FLEET])
VERSION = version("tokenfleet")


@router.get("/fleet", summary="List processes")
async def fleet(request: Request) -> Response:
    """Returns every process of the pool with its state, how many requests wait and run, and `health`. Its
    `state` is `bad` if requests are not served now, `warn` if processes are missing, else `good`. Where there
    are LoRA adapters, `adapters` has those of `GET /admin/adapters`.
    """
    pool = own_pool(request)
    listed = await list_processes(pool.client, pool.batcher)
    settings = pool.settings
    try:
        await pool.check()
        state, text = judge_processes(listed, settings.num_workers)
    except ApiError as error:
        state, text = "bad", error.text
    content = {
        "pool": settings.pool,
        "model": settings.model_name,
        "version": VERSION,
        "time_s": listed.time_s,
        "demo": settings.demo,
        "health": {"state": state, "text": text},
        "requests": listed.requests | {"limit": settings.max_concurrent_requests},
        "processes": listed.processes,
    }
    if adapters := pool.adapters.registry.adapters.values():
        content["adapters"] = [describe_adapter(pool.workers.holders, one) for one in adapters]
    if settings.models:
        content["models"] = await list_models(pool.client, settings.pools)
    return fresh_json(content)


@router.post(
    "/fleet/processes/{process_id}/kill",
    summary="Kill a process (demonstration)",
    status_code=202,
    responses=KILL_ERRORS,
)
async def kill_process(
    request: Request, process_id: Annotated[str, Path(description="One that `GET /fleet` lists.")]
) -> Response:
    """Sends SIGKILL to a process of this fleet. Needs the setting DEMO, and a request from this machine."""
    pool = own_pool(request)
    if not pool.settings.demo:
        raise forbidden("DEMO is not on")
    host, origin = request.headers.get("host", ""), request.headers.get("origin")
    if not is_loopback(urlsplit(f"//{host}").hostname or ""):  # pages of other origins can send this, too
        raise forbidden(f"the host {quoted(host)} is not a loopback address")
    if origin is not None and origin != f"{request.url.scheme}://{host}":
        raise forbidden(f"the page's origin {quoted(origin)} is not ours")
    listed = (await list_processes(pool.client, pool.batcher)).processes
    process = next((one for one in listed if one["id"] == process_id), None)
    if process is None:
        raise ApiError(404, "not_found", f"There is no process {cut(process_id)} in this fleet")
    if process["kind"] != "broker" and process["host"] != socket.gethostname():
        raise forbidden(f"it runs on {process['host'] or 'another machine'}")
    parent, user, title = await inspect_process(process["pid"])  # a child of this gateway's launcher?
    command = COMMANDS.get(process["kind"], f"tokenfleet {process['kind']}")
    if parent != os.getppid() or user != os.getuid() or command not in title:
        raise forbidden(f"process {process['pid']} is not one of this fleet")
    # After the response: a gateway may kill itself.
    return Response(
        to_json({"killed": process_id}),
        202,
        media_type="application/json",
        background=BackgroundTask(send_sigkill, process["pid"]),
    )


# --- kill ---------------------------------------------------------------------------------------------------


def forbidden(cause: str) -> ApiError:
    return ApiError(403, "forbidden", f"Not killed: {cause}")


async def inspect_process(pid: int) -> tuple[int, int, str]:
    """Parent, user and command line of a process. Raises ApiError (404) if there is no such process."""
    command = ("ps", "-ww", "-o", "ppid=,uid=,command=", "-p", str(pid))  # not cut at COLUMNS
    ps = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    stdout, _ = await ps.communicate()
    if not stdout.strip():
        raise ApiError(404, "not_found", f"There is no process {pid}")
    parent, user, title = stdout.decode(errors="replace").split(maxsplit=2)
    return int(parent), int(user), title


def send_sigkill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


CHUNK = 500
"""Entries in one read."""
SIBLINGS_MS = 5000
"""All choices of a request are queued within this time."""
CHOICE_MARKS = (".", "#")
"""Between the id of a request, or of a job, and the number of a choice."""

Entry = tuple[bytes, dict[bytes, bytes]]
Events = list[dict[str, Any]]


async def read_timelines(client: PoolClient, request_id: str) -> dict[str, Events]:
    """The events of a request or job and of its choices, oldest first, by id. The stream is read backwards
    from its newest entry.
    """
    timelines: dict[str, Events] = {}
    newest = "+"
    while entries := await client.redis.xrevrange(client.keys.timeline, newest, "-", count=CHUNK):
        for entry in entries:
            add_entry(timelines, entry, request_id)
        # no entry before this one can belong to these timelines
        first_events = [events[0] for events in timelines.values()]
        oldest_ms = int(entries[-1][0].split(b"-")[0])
        if first_events and all(
            event["what"] == "queued" and oldest_ms < event["at_ms"] - SIBLINGS_MS for event in first_events
        ):
            break
        newest = f"({entries[-1][0].decode()}"
    return dict(sorted(timelines.items()))


def add_entry(timelines: dict[str, Events], entry: Entry, request_id: str) -> None:
    """Add the events of an entry, in front of those of later entries."""
    choices = tuple(request_id + mark for mark in CHOICE_MARKS)
    for name, data in entry[1].items():
        known_id = name.decode(errors="replace")
        if known_id != request_id and not known_id.startswith(choices):
            continue
        try:
            events = [dataclasses.asdict(event) for event in decode(Timeline, data).events]
        except WireError:
            continue
        timelines[known_id] = events + timelines.get(known_id, [])


@router.get(
    "/fleet/requests/{request_id:path}",
    summary="Show a request's timeline",
    responses=error_responses(ErrorResponse, {404: "No such request"}),
)
async def request_timeline(request: Request, request_id: RequestId) -> Response:
    """Returns the events of a request and of each of its choices: queued, placed on a worker, first token,
    resumed, ended. Timelines are kept for a day at most; then the response is 404.
    """
    pool = own_pool(request)
    timelines = await read_timelines(pool.client, request_id)
    if not timelines:
        why = f"There is no timeline of a request {cut(request_id)}: it was never queued, or it has expired"
        raise ApiError(404, "not_found", why)
    return fresh_json({"request_id": request_id, "timelines": timelines})


# --- metrics ------------------------------------------------------------------------------------------------


metrics_router = APIRouter(tags=[HEALTH])
MAX_ADAPTERS_SHOWN = 64
BROKER_PATIENCE_S = 2.0
"""Less than Prometheus waits for in deploy/prometheus: a late answer means that no gateway is up."""


@metrics_router.get("/metrics", summary="Prometheus metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """Returns the metrics of all processes of the pool in Prometheus' text format: scrape one gateway only.
    While the broker does not answer, the only metric is `tokenfleet_broker_up 0`.
    """
    pool = own_pool(request)
    values: Values | None = None
    gauges: Gauges = {catalogue.BROKER_UP.name: {(): 0.0}}
    with contextlib.suppress(*ERRORS):
        async with asyncio.timeout(BROKER_PATIENCE_S):
            totals = await read_totals(pool.client)
            state, fields = pool.client.keys.state, ["blocks", "adapters"]
            granted, load = await pool.client.redis.hmget(state, fields)  # type: ignore[misc]
            listed = await list_processes(pool.client, pool.batcher)
            gauges = {**gauges_of(listed, int(granted or 0)), **await broker_gauges(pool.client)}
            gauges |= adapter_gauges(pool, load)
            pools = pools_of(request).directory.pools.items()
            gauges |= {
                catalogue.POOL_UP.name: {(name,): float(one.is_live) for name, one in pools},
                catalogue.POOL_WAITING.name: {(name,): float(one.entry.waiting) for name, one in pools},
                catalogue.POOL_DEPTH.name: {(name,): one.entry.depth for name, one in pools},
            }
            now = datetime.fromtimestamp(pool.client.clock.now_s(), UTC)
            rows = await read_months(pool.client.redis, now, now + timedelta(seconds=1))  # this month
            names = {pool.settings.model_name, *(one.name for one in pool.adapters.registry.ready)}
            values = totals | metric_values(rows, names)
    if pool.workers.max_total_tokens:
        fit_buckets(pool.workers.limits)
    text = await asyncio.to_thread(render_fleet, pool.settings.pool, values, gauges)
    return Response(text, headers={"content-type": CONTENT_TYPE, "cache-control": "no-store"})


async def broker_gauges(client: PoolClient) -> Gauges:
    """Gauges that Redis itself has; used memory is in proportion to the memory that it may use."""
    info = await client.redis.info("memory")
    most = int(info.get("maxmemory") or 0) or int(info.get("total_system_memory") or 0)
    return {
        catalogue.UNFINISHED_JOBS.name: {(): float(await client.redis.xlen(client.keys.submit))},
        catalogue.WEBHOOKS_WAITING.name: {(): float(await client.redis.zcard(client.keys.webhooks))},
        catalogue.WEBHOOKS_DEAD.name: {(): float(await client.redis.zcard(client.keys.dead_webhooks))},
        catalogue.BROKER_MEMORY.name: {(): int(info["used_memory"]) / most if most else 0.0},
    }


def adapter_gauges(pool: Pool, load: bytes | None) -> Gauges:
    """Gauges of LoRA adapters, of which those with live requests have some; of too many the busiest."""
    found = AdapterLoad()
    with contextlib.suppress(WireError):
        found = decode(AdapterLoad, load) if load else found
    busiest = sorted(found.requests, key=lambda one: one[1] + one[2], reverse=True)[:MAX_ADAPTERS_SHOWN]
    return {
        catalogue.ADAPTER_ROWS.name: {(name,): float(running) for name, running, _ in busiest},
        catalogue.ADAPTER_WAITING.name: {(name,): float(waiting) for name, _, waiting in busiest},
        catalogue.MAX_LORAS.name: {(): float(pool.workers.adapter_room[0])},
    }


def gauges_of(listed: ProcessList, num_granted: int) -> Gauges:
    """Gauges from the processes' heartbeats; `num_granted` KV blocks are granted to rows."""
    requests, workers = listed.requests, listed.of_kind("worker")
    loaded = [worker for worker in workers if worker["num_blocks"] and worker["state"] != REFUSED]
    num_blocks = sum(worker["num_blocks"] for worker in loaded)
    max_tokens = sum(worker["num_blocks"] * worker["block_size"] for worker in loaded)
    usage = num_granted / num_blocks if num_blocks else 0.0
    return {
        catalogue.QUEUE_SIZE.name: {(): requests["waiting"]},
        catalogue.LIVE_REQUESTS.name: {(): requests["live"]},
        catalogue.BATCH_SIZE.name: {(): requests["running"]},
        catalogue.BATCH_MAX_TOKENS.name: {(): usage * max_tokens},
        catalogue.BATCH_TOTAL_TOKENS.name: {(): usage * max_tokens},
        catalogue.MAX_TOTAL_TOKENS.name: {(): max_tokens},
        catalogue.KV_USAGE.name: {(): usage},
        catalogue.WORKERS.name: count_states(catalogue.WORKERS, workers),
        catalogue.BATCHERS.name: count_states(catalogue.BATCHERS, listed.of_kind("batcher")),
        catalogue.BROKER_UP.name: {(): 1.0},
    }


def count_states(metric: Metric, processes: list[dict[str, object]]) -> dict[Labels, float]:
    """The number of processes in each state; 0 for known states without a process."""
    known = dict.fromkeys(metric.labels["state"], 0)
    counts = Counter(str(process["state"]) for process in processes)
    return {(state,): float(count) for state, count in (known | counts).items()}


def render_fleet(pool: str, values: Values | None, gauges: Gauges) -> bytes:
    """Return the metrics of the whole pool.

    Args:
        values: the sums of all processes. None, if they are not known, leaves out all counters and
            histograms, because zeros would look like a restart.
        gauges: gauges that are not in it are left out.
    """
    known = [
        metric
        for metric in catalogue.TABLE
        if metric.name in gauges or (metric.kind != "gauge" and values is not None)
    ]
    return render(pool, known, values or {}, gauges)


async def read_totals(pool: PoolClient) -> dict[str, float]:
    """Return the sums of all processes, dead ones included, without fields that are no numbers."""
    found: dict[bytes, bytes] = await pool.redis.hgetall(pool.keys.metrics)  # type: ignore[misc]
    values = {}
    for name, value in found.items():
        with contextlib.suppress(ValueError):
            values[name.decode()] = float(value)
    return values
