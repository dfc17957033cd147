"""Calls of the Lua scripts of requests and workers, with arguments that most tests share."""

from collections.abc import Iterable, Sequence
from typing import Any

from redis.asyncio import Redis

from common.broker import client as brokers
from common.broker.keys import Keys, admission_keys
from common.messages.codec import encode
from common.messages.events import Events, Tokens
from common.messages.packing import pack_floats, pack_ids

KEYS = Keys("test")
UNTITLED = ("", "standard", "", 1, 0, "")
"""Arguments of `admit` for a request of the class `standard`, of no tenant and no length."""


async def call(redis: Redis, name: str, keys: list[str], args: Iterable[Any] = ()) -> Any:
    return await brokers.script(redis, name)(keys=keys, args=list(args))


async def admit(
    redis: Redis,
    request_id: str = "r1",
    payload: bytes = b"x" * 10,
    max_count: int = 2,
    max_bytes: int = 100,
    digest: str = "d",
    width: int = 1,
) -> list[Any]:
    keys = admission_keys(KEYS, request_id, "standard")
    answer: list[Any] = await call(
        redis, "admit", keys, [payload, max_count, max_bytes, digest, "ch", "g", width, *UNTITLED]
    )
    return answer


async def create_logs(redis: Redis, name: str = "w1") -> None:
    await call(redis, "create_logs", [KEYS.log(name), KEYS.reports(name)], [name, 60_000])


async def publish_plan(
    redis: Redis, plan_id: str, rows: Sequence[tuple[str, int, int]] = (), worker: str = "w1"
) -> list[Any]:
    keys = [KEYS.plans(worker), KEYS.log(worker), KEYS.epoch, *(KEYS.request(name) for name, _, _ in rows)]
    args: list[Any] = [
        plan_id,
        b"plan",
        "0-0",
        60_000,
        worker,
        *(part for _, attempt, base in rows for part in (attempt, base, 16 * attempt)),
    ]
    answer: list[Any] = await call(redis, "publish_plan", keys, args)
    return answer


def entry(request_id: str, index: int, ids: list[int], attempt: int = 1) -> bytes:
    return encode(
        Events("w", 0, [Tokens(request_id, attempt, index, pack_ids(ids), pack_floats([-1.0] * len(ids)))])
    )


async def flush(
    redis: Redis,
    sequence: int,
    log: bytes = b"",
    report: bytes = b"",
    messages: Sequence[tuple[str, bytes]] = (),
    prompts: Sequence[tuple[str, bytes]] = (),
    terminals: Sequence[tuple[Any, ...]] = (),
    spills: Sequence[tuple[str, int, bytes]] = (),
    mode: str = "",
    attempt: int = 1,
    worker: str = "w1",
) -> Any:
    messages = [("", log or entry("r0", 0, [])), *messages]
    keys = [KEYS.log(worker), KEYS.reports(worker)]
    keys += [KEYS.request(name) for name, _ in prompts]
    for name, *_ in terminals:
        keys += [KEYS.request(name), KEYS.tokens(name)]
    for name, *_ in spills:
        keys += [KEYS.request(name), KEYS.tokens(name)]
    args: list[Any] = [
        sequence,
        report,
        "0-0",
        60_000,
        worker,
        len(messages),
        len(prompts),
        len(terminals),
        len(spills),
        mode,
    ]
    args += [part for message in messages for part in message]
    args += [records for _, records in prompts]
    args += [part for _, *rest in terminals for part in (attempt, 0, *rest)]
    args += [part for _, offset, records in spills for part in (attempt, 0, offset, records)]
    return await call(redis, "flush", keys, args)


async def seal(redis: Redis, worker: str = "w1") -> Any:
    keys = [KEYS.log(worker), KEYS.reports(worker), KEYS.worker(worker), KEYS.workers, KEYS.sealed]
    return await call(redis, "seal", keys, [worker, "died", 60_000])
