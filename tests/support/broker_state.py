"""Broker state as gateways and workers write it: queued requests, workers with logs, committed tokens."""

import asyncio
from collections.abc import Sequence as Items
from dataclasses import replace
from typing import Any

from redis.asyncio import Redis

from api.requests import request_scripts
from api.requests.request_scripts import AdmitReply, KeyCharge
from batcher.actions import ActionQueue
from common.api_keys import ApiKey
from common.broker import heartbeat
from common.broker.committed import read
from common.broker.keys import Keys
from common.broker.lua import run_script
from common.broker.pool_client import PoolClient
from common.messages.codec import encode
from common.messages.events import Events, Tokens
from common.messages.plan import WorkerCapacity
from common.messages.records import pack_floats, pack_ids, unpack_records
from common.messages.request import Generate, StoppingParams
from gpu_worker import worker_scripts
from tests.support.events import as_sent
from tests.support.waiting import wait_until

KEYS = Keys("default")
TTL_MS = 600_000


def make_request(request_id: str) -> Generate:
    return Generate(request_id, "d", pack_ids([1] * 4), StoppingParams(20))


def make_capacity(incarnation: str, num_blocks: int = 30, **fields: Any) -> WorkerCapacity:
    capacity = WorkerCapacity(incarnation, "w0", "m", "float32", 16, num_blocks, 512, 8192)
    return replace(capacity, **fields)


async def admit_request(
    redis: Redis,
    request: Generate,
    payload: bytes = b"x" * 10,
    max_requests: int = 1000,
    max_bytes: int = 10**9,
    weight: float = 1.0,
) -> AdmitReply:
    """Admit a request. Its API key, if it has one, has no limits."""
    call = request_scripts.admit(
        KEYS,
        request,
        payload=payload,
        answer=b"",
        weight=weight,
        max_requests=max_requests,
        max_bytes=max_bytes,
        charge=KeyCharge(ApiKey(request.key_id, "d"), 1, 0, 0) if request.key_id else None,
    )
    return await run_script(redis, call)


async def admit(redis: Redis, request: Generate, payload: bytes | None = None) -> str:
    """Queue a request as a gateway does. Return its entry id."""
    reply = await admit_request(redis, request, payload or encode(request))
    assert reply.outcome == "admitted"
    return reply.entry_id


async def queue(
    redis: Redis,
    name: str,
    prompt: Items[int],
    num_tokens: int,
    payload: bytes | None = None,
    **fields: Any,
) -> None:
    """Queue a greedy request of so many tokens."""
    stopping = StoppingParams(num_tokens, ignore_eos=True)
    await admit(redis, Generate(name, "d", pack_ids(prompt), stopping, **fields), payload)


async def start_worker(redis: Redis, incarnation: str, capacity: bytes | None = None) -> None:
    """Create the logs of a worker and send its first heartbeat."""
    await run_script(redis, worker_scripts.create_logs(KEYS, incarnation, owner=incarnation))
    await send_heartbeat(redis, incarnation, capacity=capacity)


async def send_heartbeat(
    redis: Redis, incarnation: str, state: str = "ready", capacity: bytes | None = None
) -> None:
    call = worker_scripts.worker_heartbeat(
        KEYS,
        incarnation,
        capacity=capacity or encode(make_capacity(incarnation)),
        ttl_ms=TTL_MS,
        state=state,
        step=0,
        fields={},
    )
    await run_script(redis, call)


async def seal(redis: Redis, worker: str = "w1", why: str = "died") -> bool:
    return await run_script(redis, heartbeat.seal(KEYS, worker, why=why))


async def place(redis: Redis, request_id: str, incarnation: str, attempt: int = 1, base: int = 0) -> None:
    """Write what a published plan writes to the request: which worker holds it."""
    await redis.hset(  # type: ignore[misc]
        KEYS.request(request_id), mapping={"worker": incarnation, "attempt": attempt, "base": base}
    )


def make_tokens(request_id: str, index: int, ids: Items[int], attempt: int = 1) -> Tokens:
    return Tokens(request_id, attempt, index, pack_ids(ids), pack_floats([-1.0] * len(ids)), ["x"] * len(ids))


async def write_log(redis: Redis, incarnation: str, *tokens: Tokens) -> None:
    """Append one flush to a worker's log."""
    await redis.xadd(KEYS.log(incarnation), {"entry": encode(Events("w", 0, **as_sent(tokens)))})


async def error_of(redis: Redis, request_id: str) -> bytes | None:
    """Return why a request has ended without an answer, if it has."""
    error: bytes | None = await redis.hget(KEYS.request(request_id), "error")  # type: ignore[misc]
    return error


async def result_ids(redis: Redis, request_id: str) -> list[int]:
    """Return the ids of a request's answer, once it has ended without an error."""
    await wait_until(lambda: redis.hexists(KEYS.request(request_id), "terminal"))
    state = (await read(PoolClient(redis, KEYS), [request_id]))[request_id]
    assert not state.error and state.num_tokens == state.num_final, state
    return unpack_records(state.records)[0]


async def run_all(actions: ActionQueue) -> None:
    """Run the actions of a queue, until none is left."""
    while len(actions):
        while actions.can_run:
            await actions.run_next()
        await asyncio.gather(*actions.due)
        actions.take_replies()
