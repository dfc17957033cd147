"""Calls of the Lua scripts of requests and workers, with arguments that most tests share."""

from collections.abc import Sequence
from dataclasses import replace

from redis.asyncio import Redis

from api.requests import request_scripts
from api.requests.request_scripts import AdmitReply, KeyCharge
from batcher import batcher_scripts
from common.api_keys import ApiKey
from common.broker import heartbeat
from common.broker.committed import Committed
from common.broker.keys import Keys
from common.broker.lua import run_script
from common.messages.events import Terminal
from common.messages.plan import NewRow, Plan
from common.messages.request import Generate, StoppingParams
from gpu_worker import worker_scripts
from gpu_worker.worker_scripts import FlushedRow, FlushReply, ended

KEYS = Keys("test")
REQUEST = Generate("r1", "d", b"", StoppingParams(1), channel="ch", gateway="g")
"""A request of the class `standard`, of no tenant and no length."""


async def admit(
    redis: Redis, request_id: str = "r1", payload: bytes = b"x" * 10, max_count: int = 2, max_bytes: int = 100
) -> AdmitReply:
    return await admit_request(redis, replace(REQUEST, request_id=request_id), payload, max_count, max_bytes)


async def admit_request(
    redis: Redis,
    request: Generate,
    payload: bytes,
    max_count: int = 1000,
    max_bytes: int = 10**9,
    keys: Keys = KEYS,
) -> AdmitReply:
    """Admit a request. Its API key, if it has one, has no limits."""
    call = request_scripts.admit(
        keys,
        request,
        payload=payload,
        answer=b"",
        weight=1.0,
        max_requests=max_count,
        max_bytes=max_bytes,
        charge=KeyCharge(ApiKey(request.key_id, "d"), 1, 0, 0) if request.key_id else None,
    )
    return await run_script(redis, call)


async def dequeue(redis: Redis, request_id: str, entry_id: str) -> bool:
    return await run_script(redis, batcher_scripts.dequeue(KEYS, {request_id: entry_id})) == [1]


async def create_logs(redis: Redis, name: str = "w1", owner: str = "w1") -> bool:
    return await run_script(redis, worker_scripts.create_logs(KEYS, name, owner=owner))


async def publish_plan(
    redis: Redis, plan_id: str, rows: Sequence[tuple[str, int, int]] = ()
) -> tuple[str, list[int]]:
    """Publish a plan that starts rows: request, attempt, base of each."""
    epoch, number = map(int, plan_id.split("-"))
    started = [
        NewRow(0, attempt, base, b"", b"", replace(REQUEST, request_id=name), 16 * attempt)
        for name, attempt, base in rows
    ]
    plan = Plan(epoch, number, 0, 0, started)
    return await run_script(redis, batcher_scripts.publish_plan(KEYS, "w1", plan=plan, oldest=0))


async def save(
    redis: Redis, worker: str, attempt: int, offset: int, saved: bytes, num_speculated: int = 0
) -> str:
    """Save what the log of a worker that crashed has of `r1`, from an offset in its string on."""
    state = Committed(
        True,
        worker,
        attempt,
        crash_count=1,
        num_speculated=num_speculated,
        records=b"-" * offset + saved,
        spilled_bytes=offset,
    )
    return await run_script(redis, batcher_scripts.save_committed(KEYS, own_epoch=5, states={"r1": state}))


def flushed_end(end: Terminal, records: bytes, channel: str = "", payload: bytes = b"") -> FlushedRow:
    """The end of a request's first attempt."""
    return FlushedRow(end.request_id, 1, 0, ended(end, records, 60_000, channel, payload))


async def flush(
    redis: Redis,
    sequence: int,
    messages: Sequence[tuple[str, bytes]] = (),
    terminals: Sequence[FlushedRow] = (),
    spills: Sequence[tuple[str, int, bytes]] = (),
    counts: Sequence[FlushedRow] = (),
) -> FlushReply:
    """Write a flush with spills: request, offset, records of each."""
    call = worker_scripts.flush(
        KEYS,
        "w1",
        sequence=sequence,
        report=b"",
        acknowledged=0,
        mode="",
        messages=[("", b"an entry of the log"), *messages],
        prompts=[],
        terminals=terminals,
        spills=[FlushedRow(name, 1, 0, (offset, records)) for name, offset, records in spills],
        counts=counts,
    )
    return await run_script(redis, call)


async def seal(redis: Redis, worker: str = "w1") -> bool:
    return await run_script(redis, heartbeat.seal(KEYS, worker, why="died"))
