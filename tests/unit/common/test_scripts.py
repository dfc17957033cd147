"""Scripts of requests, workers and the batcher, one by one, against a real broker.
Admission: room for each class and tenant, and places that come back whatever dies.
Logits in the broker: one attempt's, whole and in order, or none; and what of them may be live at once.
The scripts of jobs and their records, each alone, against the real broker.
Usage: each committed token is counted once, and the prompt with the first; budgets of API keys; months.
"""

import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import OutOfMemoryError

from api.jobs import records
from api.jobs.records import DEAD, DONE, SCHEDULED, JobEnding
from api.requests import request_scripts
from api.requests.metrics import month_begin, month_name, read_hours, read_months, seconds_to_next_month
from api.requests.request_scripts import AdmitReply, AttachReply, cancel_request
from batcher import batcher_scripts
from common.broker.committed import Committed, read_slice
from common.broker.keys import RESULT_TTL_MS, SEALED, Keys
from common.broker.lua import Args, call_script, load_script, run_script, script_names
from common.broker.pool_client import PoolClient
from common.messages.codec import encode
from common.messages.events import Terminal, terminal_for
from common.messages.plan import NewRow, Plan
from common.messages.records import RECORD, pack_ids
from common.messages.request import BeamParams, Generate, LogitsParams, StoppingParams, UsageAccount
from gpu_worker import worker_scripts
from gpu_worker.worker_scripts import FlushedRow, FlushReply, ended
from tests.support.broker.listening import Published, listening
from tests.support.broker_state import KEYS, admit_request, seal

REQUEST = Generate("r1", "d", b"", StoppingParams(1), channel="ch", gateway="g")
"""A request of the class `standard`, of no tenant and no length."""


async def dequeue(redis: Redis, request_id: str, entry_id: str) -> bool:
    return await run_script(redis, batcher_scripts.dequeue(KEYS, [(request_id, entry_id)])) == [1]


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


def flushed_end(
    end: Terminal, records: bytes, channel: str = "", payload: bytes = b"", num_used: int | None = None
) -> FlushedRow:
    """The end of a request's first attempt; it has used all of its tokens by default."""
    num_used = end.num_tokens if num_used is None else num_used
    return FlushedRow(end.request_id, 1, 0, ended(end, records, 60_000, channel, payload, num_used))


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


# --- scripts ------------------------------------------------------------------------------------------------

ANSWER = RECORD.pack(7, -1.0)
"""What is kept of an answer of one token."""


def length_end(payload: bytes) -> FlushedRow:
    return flushed_end(Terminal("r1", "length", 1), ANSWER, "ch", payload)


@pytest.fixture
async def published(redis: Redis) -> AsyncIterator[Published]:
    async with listening(redis, "ch", "other") as heard:
        yield heard


async def test_a_sealed_or_missing_log_refuses_everything(redis: Redis, published: Published) -> None:
    await admit_request(redis, REQUEST)
    assert await flush(redis, 1, messages=[("ch", b"x")]) == ("MISSING", [])
    await create_logs(redis)
    await flush(redis, 1)
    assert await seal(redis)
    assert await flush(
        redis,
        2,
        messages=[("ch", b"x")],
        terminals=[length_end(b"end")],
        spills=[("r1", 0, b"12345678")],
    ) == ("SEALED", [])
    assert await published() == []
    assert await redis.exists(KEYS.tokens("r1")) == 0
    assert (await redis.xrange(KEYS.log("w1")))[-1][0] == SEALED.encode()
    assert await seal(redis)
    assert await redis.xlen(KEYS.log("w1")) == 3, "sealed once"


async def test_only_the_first_terminal_is_published(redis: Redis, published: Published) -> None:
    await admit_request(redis, REQUEST)
    await create_logs(redis)

    async def finish(end: Terminal, payload: bytes) -> str:
        call = batcher_scripts.finish(KEYS, end, own_epoch=5, kept_ms=60_000, channel="ch", payload=payload)
        return await run_script(redis, call)

    cancelled = Terminal("r1", "cancelled", 1, "cancelled: client", "cancelled")
    assert await finish(cancelled, b"cancelled") == "OK"
    await flush(redis, 1, terminals=[length_end(b"length")])
    assert await finish(Terminal("r1", "error", 1, "gone", "generation"), b"e") == "ENDED"
    assert await published() == [b"cancelled"]
    end = await redis.hmget(KEYS.request("r1"), ["terminal", "num_tokens", "error", "error_type"])  # type: ignore[misc]
    assert end == [b"cancelled", b"1", b"cancelled: client", b"cancelled"]
    assert await redis.exists(KEYS.tokens("r1")) == 0
    assert 0 < await redis.pttl(KEYS.request("r1")) <= 60_000
    assert not await cancel_request(PoolClient(redis, KEYS), "r1")


async def test_two_processes_never_share_an_incarnation(redis: Redis) -> None:
    assert await create_logs(redis, owner="first")
    assert await create_logs(redis, owner="first")  # its answer was lost
    assert not await create_logs(redis, owner="second")
    assert await redis.xlen(KEYS.log("w1")) == await redis.xlen(KEYS.reports("w1")) == 1


# --- batcher scripts ----------------------------------------------------------------------------------------


async def test_the_run_that_makes_the_first_token_says_how_much_of_the_prompt_was_cached(
    redis: Redis,
) -> None:
    """Another that began before there was a token takes its place; one behind a token does not."""
    await admit_request(redis, REQUEST)
    await create_logs(redis)
    for number, (attempt, base, cached) in enumerate([(1, 0, b"16"), (2, 0, b"32"), (3, 1, b"32")], 1):
        await publish_plan(redis, f"5-{number}", [("r1", attempt, base)])
        assert await redis.hget(KEYS.request("r1"), "cached") == cached  # type: ignore[misc]


async def test_an_earlier_epoch_publishes_and_saves_nothing(redis: Redis) -> None:
    await create_logs(redis)
    await admit_request(redis, REQUEST)
    await redis.set(KEYS.epoch, 6)
    assert (await publish_plan(redis, "5-1", [("r1", 1, 0)]))[0] == "FENCED"
    assert await save(redis, "w1", 1, 0, b"x" * 8) == "FENCED"
    assert await redis.exists(KEYS.plans("w1"), KEYS.tokens("r1")) == 0
    assert (await publish_plan(redis, "6-1", [("r1", 1, 0)]))[0] == "OK"


async def test_a_plan_that_a_full_broker_does_not_take_is_not_one_of_an_earlier_epoch(redis: Redis) -> None:
    await create_logs(redis)
    await redis.config_set("maxmemory", 1)
    try:
        with pytest.raises(OutOfMemoryError):
            await publish_plan(redis, "5-1")
    finally:
        await redis.config_set("maxmemory", 0)
    assert (await publish_plan(redis, "5-1"))[0] == "OK"


async def test_saving_leaves_the_holder_of_a_request_that_went_on_elsewhere(redis: Redis) -> None:
    await create_logs(redis)
    await admit_request(redis, REQUEST)
    await publish_plan(redis, "5-1", [("r1", 2, 0)])
    assert await save(redis, "w0", 2, 0, b"x" * 8) == "OK"
    assert await redis.hmget(KEYS.request("r1"), ["worker", "crash_count"]) == [b"w1", b"0"]  # type: ignore[misc]
    assert await redis.get(KEYS.tokens("r1")) == b"x" * 8


async def test_saving_leaves_a_request_that_has_another_attempt_than_was_read(redis: Redis) -> None:
    """A gateway has offered meanwhile what it showed, which ends where the string does that was read."""
    await create_logs(redis)
    await admit_request(redis, REQUEST)
    await publish_plan(redis, "5-1", [("r1", 2, 0)])
    await redis.set(KEYS.tokens("r1"), b"y" * 8)
    assert await save(redis, "w1", 1, 8, b"x" * 8) == "OK"
    assert await redis.get(KEYS.tokens("r1")) == b"y" * 8
    assert await redis.hget(KEYS.request("r1"), "worker") == b"w1"  # type: ignore[misc]


# --- terminal scripts ---------------------------------------------------------------------------------------

RECORDS = b"".join(RECORD.pack(token_id, -1.0) for token_id in range(200))
OWN = [KEYS.request("r1"), KEYS.tokens("r1")]


async def end(redis: Redis, why: str, spilled: bytes = b"") -> None:
    """Have a worker end a request of 200 tokens, of which it has spilled some."""
    await create_logs(redis)
    await admit_request(redis, REQUEST)
    await publish_plan(redis, "5-1", [("r1", 1, 0)])
    await flush(redis, 1, spills=[("r1", 0, spilled)])
    terminals = [flushed_end(terminal_for("r1", why, 200), RECORDS)]
    assert await flush(redis, 2, terminals=terminals) == ("OK", [])


async def read_end(redis: Redis) -> Committed:
    return (await read_slice(PoolClient(redis, KEYS), {"r1": 0}, of_ended=True))["r1"]


async def own_keys(redis: Redis) -> list[bytes]:
    return sorted(await redis.keys(KEYS.key("*r1*")))


async def test_an_answer_is_its_tokens_and_no_second_object(redis: Redis) -> None:
    """Spilled or not: eight bytes a token, and what a string takes besides."""
    for spilled in (b"", RECORDS[:800], RECORDS):
        await redis.flushdb()
        await end(redis, "length", spilled)
        assert await own_keys(redis) == sorted(key.encode() for key in OWN)
        state = await read_end(redis)
        assert (state.terminal, state.num_final, state.error, state.records) == ("length", 200, "", RECORDS)
        assert await redis.memory_usage(KEYS.tokens("r1")) <= len(RECORDS) * 1.25 + 200
        for key in OWN:
            assert 0 < await redis.pttl(key) <= 60_000


async def test_a_failure_keeps_its_words_and_no_token(redis: Redis) -> None:
    await end(redis, "timeout", RECORDS[:800])
    state = await read_end(redis)
    assert (state.terminal, state.error_type, state.records) == ("error", "timeout", b"") and state.error
    assert await own_keys(redis) == [KEYS.request("r1").encode()]


# --- reader scripts -----------------------------------------------------------------------------------------


async def test_a_repetition_that_was_not_admitted_ends_nothing(redis: Redis) -> None:
    """Its gateway knows the id, and takes itself for the first reader."""
    await admit_request(redis, REQUEST)
    pool, other = PoolClient(redis, KEYS), replace(REQUEST, digest="other")
    assert not await cancel_request(pool, "r1", 0, other.digest)
    assert not await run_script(redis, request_scripts.forget(KEYS, other, reader=0))
    assert await cancel_request(pool, "r1", 0, REQUEST.digest)
    assert await run_script(redis, request_scripts.forget(KEYS, REQUEST, reader=0))


async def attach(redis: Redis, *request_ids: str, gateway: str, inherited: int | None = None) -> AttachReply:
    call = request_scripts.attach(KEYS, request_ids, gateway=gateway, inherited=inherited)
    return await run_script(redis, call)


def attached(reader: int) -> AttachReply:
    return AttachReply("attached", reader, ["d"])


async def test_a_detached_request_has_no_gateway_whoever_reads(redis: Redis) -> None:
    await admit_request(redis, REQUEST)
    await redis.hset(KEYS.request("r1"), "gateway", "")  # type: ignore[misc]
    assert await attach(redis, "r1", gateway="g2") == attached(1)
    assert await redis.hget(KEYS.request("r1"), "gateway") == b""  # type: ignore[misc]


async def test_an_inherited_connection_yields_to_the_one_on_which_its_client_came_back(redis: Redis) -> None:
    """Heirs follow each other on one connection; one whose client has another is superseded."""
    await admit_request(redis, REQUEST)
    assert await attach(redis, "r1", gateway="g2", inherited=0) == attached(1)
    assert await attach(redis, "r1", gateway="g3", inherited=0) == attached(2)
    assert await attach(redis, "r1", gateway="g4") == attached(3)
    assert await attach(redis, "r1", gateway="g2", inherited=0) == AttachReply("superseded")
    assert await attach(redis, "r1", gateway="g2", inherited=3) == attached(4)


# --- places -------------------------------------------------------------------------------------------------

LIMIT = 10


async def ask(
    redis: Redis,
    name: str,
    class_name: str = "standard",
    tenant: str = "",
    weight: float = 1.0,
    tokens: int = 5,
    limit: int = LIMIT,
) -> str:
    """`admitted`, or why not."""
    request = replace(
        REQUEST, request_id=name, prompt_ids=pack_ids([1] * tokens), class_name=class_name, tenant=tenant
    )
    return (await admit_request(redis, request, max_requests=limit, weight=weight)).outcome


async def fill(redis: Redis, name: str, count: int, **terms: Any) -> int:
    """How many of so many are admitted."""
    return [await ask(redis, f"{name}{i}", **terms) for i in range(count)].count("admitted")


async def end_places(redis: Redis, name: str) -> None:
    entry_id = await redis.hget(KEYS.request(name), "entry")  # type: ignore[misc]
    await redis.hset(KEYS.request(name), "terminal", "length")  # type: ignore[misc]
    for _ in range(2):
        assert await dequeue(redis, name, entry_id)


async def test_one_call_returns_the_places_of_all_that_have_ended(redis: Redis) -> None:
    """Of two tenants and two classes. One has not ended, and one was removed before."""
    queued = {}
    for name, tenant, class_name in (("1", "a", ""), ("2", "a", ""), ("3", "b", ""), ("4", "b", "batch")):
        request = replace(REQUEST, request_id=name, tenant=tenant, class_name=class_name or "standard")
        queued[name] = (await admit_request(redis, request)).entry_id
        if name != "2":
            await redis.hset(KEYS.request(name), "terminal", "length")  # type: ignore[misc]
    assert await dequeue(redis, "1", queued["1"])
    assert await run_script(redis, batcher_scripts.dequeue(KEYS, [*queued.items()])) == [1, 0, 1, 1]
    places = await redis.hgetall(KEYS.places)  # type: ignore[misc]
    counts = [
        int(places[name]) for name in (b"all", b"requests:standard", b"bytes:standard", b"requests:batch")
    ]
    assert counts == [1, 1, 10, 0]
    assert places[b"tenant:standard:a"] == b"1" and not {b"tenant:standard:b", b"tenant:batch:b"} & set(
        places
    )
    assert float(places[b"interval_ms"]) >= 0 and await redis.xlen(KEYS.requests) == 1


async def test_one_tenant_alone_has_every_place_and_leaves_them_to_those_who_come(redis: Redis) -> None:
    assert await fill(redis, "a", 100, tenant="a") == LIMIT
    assert await ask(redis, "b0", tenant="b") == "requests"
    for i in range(LIMIT):
        await end_places(redis, f"a{i}")
        assert await ask(redis, f"again{i}", tenant="a") == ("tenant" if i < LIMIT // 2 else "admitted")
        if i < LIMIT // 2:
            assert await ask(redis, f"b{i}", tenant="b") == "admitted"
        else:
            break
    assert await fill(redis, "more", 3, tenant="b") == 0


async def test_shares_have_the_weights_of_tenants(redis: Redis) -> None:
    for tenant, weight in (("a", 4.0), ("b", 1.0)):
        await ask(redis, f"first-{tenant}", tenant=tenant, weight=weight)
    assert await fill(redis, "b", 10, tenant="b", weight=1.0) == 1
    assert await fill(redis, "a", 10, tenant="a", weight=4.0) == 7


async def test_a_share_grows_when_other_tenants_ask_no_more(redis: Redis) -> None:
    """The sum of weights is kept beside the places: tenants that have left must leave it."""
    tenants = KEYS.tenants("standard")
    for tenant in "abcde":
        await ask(redis, f"first-{tenant}", tenant=tenant)
    assert await fill(redis, "a", 10, tenant="a") == 1, "two of ten places"
    for tenant in "cde":
        await redis.zadd(tenants, {f"1.0 {tenant}": 1})
        await end_places(redis, f"first-{tenant}")
    assert await fill(redis, "more", 10, tenant="a") == 3, "five of ten"
    for name in ("first-a", "first-b", "a0", "more0", "more1", "more2"):
        await end_places(redis, name)
    assert not await redis.exists(KEYS.places)
    assert await fill(redis, "again", 10, tenant="a") == 5, "the sum is made anew"
    assert await ask(redis, "new", tenant="f", weight=3.0) == "admitted"
    assert await fill(redis, "f", 10, tenant="f", weight=3.0) == 4, "up to the limit"
    await end_places(redis, "again0")
    assert await ask(redis, "last", tenant="a") == "tenant", "two of ten"


async def test_tenants_of_which_none_has_asked_for_long_are_counted_once_when_they_are_back(
    redis: Redis,
) -> None:
    """Their key has expired, the places of what they run are taken still."""
    for tenant in "ab":
        await ask(redis, f"first-{tenant}", tenant=tenant)
    for i in range(3):
        assert await ask(redis, f"a{i}", tenant="a") == "admitted"
        await redis.delete(KEYS.tenants("standard"))
        assert await ask(redis, f"b{i}", tenant="b") == "admitted"
    assert await fill(redis, "more", 10, tenant="a") == 1, "five of ten"


async def test_entries_of_an_older_version_are_counted(redis: Redis) -> None:
    """They do not say what they take, and older versions delete entries without giving the places back."""
    for _ in range(3):
        old = await redis.xadd(KEYS.requests, {"generate": b"x" * 7})
    assert await fill(redis, "r", 20) == LIMIT - 3
    await redis.xdel(KEYS.requests, old, await redis.hget(KEYS.request("r0"), "entry"))  # type: ignore[misc]
    assert await fill(redis, "s", 20) == 2


async def test_what_is_refused_says_when_to_ask_again(redis: Redis) -> None:
    await fill(redis, "r", LIMIT)
    await redis.hset(KEYS.places, "interval_ms", "250.0")  # type: ignore[misc]
    reply = await admit_request(redis, replace(REQUEST, request_id="late"), max_requests=4)
    wanted = AdmitReply("requests", num_counted=LIMIT, wait_ms=7 * 250)
    assert reply == wanted, "seven must end before one of four places is free"
    for i in range(3):
        await end_places(redis, f"r{i}")
    assert 0 <= float(await redis.hget(KEYS.places, "interval_ms")) < 250  # type: ignore[misc]
    for i in range(3, LIMIT):
        await end_places(redis, f"r{i}")
    assert not await redis.exists(KEYS.places)


async def test_an_entry_that_is_no_request_gives_its_place_back(redis: Redis) -> None:
    """Somebody else wrote it: it weighs nothing."""
    foreign = await redis.xadd(KEYS.requests, {"hello": "world"})
    await fill(redis, "r", 1)
    assert await dequeue(redis, "foreign", foreign)
    places = await redis.hgetall(KEYS.places)  # type: ignore[misc]
    assert (places[b"all"], places[b"bytes:standard"], places[b"tenant:standard:"]) == (b"1", b"10", b"1")


# --- logits -------------------------------------------------------------------------------------------------

ROW = b"01234567"


async def write(redis: Redis, place: int, values: bytes, attempt: int = 1, worker: str = "w1") -> int | str:
    piece = FlushedRow("r1", attempt, 0, (place, len(values) // len(ROW), values))
    return await run_script(redis, worker_scripts.write_logits(KEYS, worker, piece, ttl_ms=60_000))


async def start(redis: Redis, attempt: int = 1, worker: str = "w1") -> None:
    await create_logs(redis, worker, worker)
    fields: dict[Any, Any] = {"digest": "d", "worker": worker, "attempt": attempt}
    await redis.hset(KEYS.request("r1"), mapping=fields)  # type: ignore[misc]


async def test_nothing_is_written_for_a_request_that_is_gone_or_by_a_sealed_worker(redis: Redis) -> None:
    await start(redis)
    await redis.hset(KEYS.request("r1"), "terminal", "length")  # type: ignore[misc]
    assert await write(redis, 0, ROW) == worker_scripts.LOGITS_REFUSED
    await redis.delete(KEYS.request("r1"))
    assert await write(redis, 0, ROW) == worker_scripts.LOGITS_REFUSED
    await start(redis)
    assert await seal(redis)
    assert (await write(redis, 0, ROW), await write(redis, 0, ROW, worker="w9")) == ("SEALED", "MISSING")
    assert not await redis.exists(KEYS.logits("r1"))


async def test_logits_and_streams_of_processes_that_die_at_once_expire(redis: Redis) -> None:
    await start(redis)
    assert await write(redis, 0, ROW) == 1
    for key in (KEYS.logits("r1"), KEYS.log("w1"), KEYS.reports("w1")):
        assert await redis.pttl(key) > 0


async def test_a_request_that_is_offered_again_after_its_end_does_not_expire(redis: Redis) -> None:
    """The client was shown other tokens than those with which a broker, restored, says that it ended."""
    await end(redis, "length")
    offered: Any = {"made_by": "w1", "made_in": 1, "records": packed(2), "prompt_records": b""}
    reader: Any = {"num_cached": None, "answer": b"", "reader": 0, "connection": 0}
    call = request_scripts.offer(KEYS, replace(REQUEST, num_shown=2), reopen=True, **offered, **reader)
    assert (await run_script(redis, call)).outcome == "queued"
    assert await redis.pttl(KEYS.request("r1")) == -1


async def test_an_answer_that_ended_as_cancelled_has_no_new_reader(redis: Redis) -> None:
    await admit_request(redis, REQUEST)
    await redis.hset(KEYS.request("r1"), "terminal", "cancelled")  # type: ignore[misc]
    assert await attach(redis, "r1", gateway="g2") == AttachReply("cancelled")


# --- places -------------------------------------------------------------------------------------------------


def returning(name: str, num_rows: int) -> Generate:
    """A request that returns so many rows of 40 bytes."""
    return replace(
        REQUEST,
        request_id=name,
        prompt_ids=pack_ids([1]),
        stopping=StoppingParams(num_rows),
        logits=LogitsParams(False, True, "float32", 10),
    )


async def ask_with_logits(redis: Redis, request: Generate) -> str:
    return (await admit_request(redis, request, encode(request), 10, 2000)).outcome


async def test_the_logits_of_live_requests_have_a_limit(redis: Redis) -> None:
    """One request is taken in any case; requests without logits do not wait for those with."""
    assert await ask_with_logits(redis, returning("r1", 60)) == "admitted"
    assert await ask_with_logits(redis, returning("r2", 1)) == "bytes"
    plain = await admit_request(redis, replace(REQUEST, request_id="r3"), max_bytes=2000)
    assert plain.outcome == "admitted"
    entry_id = await redis.hget(KEYS.request("r1"), "entry")  # type: ignore[misc]
    await redis.hset(KEYS.request("r1"), "terminal", "length")  # type: ignore[misc]
    assert await dequeue(redis, "r1", entry_id)
    assert [await ask_with_logits(redis, returning(f"s{i}", 25)) for i in range(3)] == [
        "admitted",
        "admitted",
        "bytes",
    ]
    await redis.delete(KEYS.places)  # they are counted anew
    assert await ask_with_logits(redis, returning("s3", 25)) == "bytes"


# --- jobs ---------------------------------------------------------------------------------------------------

JOB, STREAM, RESULT = KEYS.job("a"), KEYS.reply("a"), KEYS.result("a")

GROUP = "g"
BROKEN = JobEnding(DEAD, 424, "generation", "it broke")


async def note(
    redis: Redis, job_id: str, address: str = "", not_before_ms: int = 0, num_fields: int = 0
) -> str:
    """Submit a job, and note it."""
    fields: dict[Any, Any] = {"job": "{}", **{f"x{number}": "" for number in range(num_fields)}}
    entry_id: str = (await redis.xadd(KEYS.submit, fields)).decode()
    args: Args = dict.fromkeys(script_names("register_job")[1].given, "")
    args |= {"job_id": job_id, "entry_id": entry_id, "address": address, "group": GROUP, "digest": "d"}
    args |= {"not_before_ms": not_before_ms, "max_scheduled": 9, "max_addresses": 9}
    more = ["first_entry", entry_id]
    return await run_script(
        redis, call_script("register_job", bytes.decode, KEYS, job_id, args=args, more_args=more)
    )


async def end_job(redis: Redis, job_id: str, ending: JobEnding = BROKEN) -> None:
    call = records.write_reply(KEYS, job_id, records.Listener(), [], 0, b"{}", ending=ending)
    await run_script(redis, call)


async def members(redis: Redis, name: str) -> list[bytes]:
    return await redis.zrange(KEYS.job_set(name), 0, -1)  # type: ignore[no-any-return]


async def test_of_too_many_dead_jobs_the_oldest_leave_with_all_that_is_kept(
    redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "MAX_DEAD", 2)
    for name in "abc":
        await note(redis, name)
        await end_job(redis, name)
    assert await members(redis, DEAD) == [b"b", b"c"]
    assert await redis.exists(KEYS.job_record("a"), KEYS.job_entries("a")) == 0
    await redis.zadd(KEYS.job_set(DEAD), {"b": 1})
    await note(redis, "d")
    await end_job(redis, "d")
    assert await members(redis, DEAD) == [b"c", b"d"]


async def test_a_scheduled_job_is_submitted_whatever_its_entries_are(redis: Redis) -> None:
    """One of thousands of fields, and one that is still in `submit` for another address."""
    await note(redis, "a", "first")
    assert await note(redis, "a", "second", not_before_ms=2**42, num_fields=10_000) == "scheduled"
    await redis.zadd(KEYS.job_set(SCHEDULED), {"a": 1})
    release = call_script("release_jobs", int, KEYS, args={"max_jobs": 9, "submit_limit": 9})
    assert await run_script(redis, release) == 1
    (first_entry, _), (_, fields) = await redis.xrange(KEYS.submit)
    assert fields == {b"job": b"{}", b"first_entry": first_entry}
    assert await members(redis, SCHEDULED) == []


async def test_a_done_job_is_remembered_without_its_entry(redis: Redis) -> None:
    await note(redis, "a", address="ext:me")
    await end_job(redis, "a", JobEnding(DONE, 200))
    assert await redis.exists(KEYS.job_entries("a")) == 0
    assert 0 < await redis.pttl(KEYS.job_record("a")) <= RESULT_TTL_MS
    await end_job(redis, "never-noted")
    assert await redis.exists(KEYS.job_record("never-noted")) == 0


# --- usage --------------------------------------------------------------------------------------------------

ACCOUNT = UsageAccount("m")


def request(
    name: str = "r1", num_prompt: int = 20, account: UsageAccount = ACCOUNT, key_id: str = "k"
) -> Generate:
    ids = pack_ids([1] * num_prompt)
    stopping = StoppingParams(1000)
    return Generate(
        name, "d", ids, stopping, channel="ch", gateway="g", tenant="t", key_id=key_id, account=account
    )


async def run(redis: Redis, asked: Generate, number: int = 1) -> None:
    """Admit a request and place it on the worker, which finds 16 tokens of its prompt cached."""
    assert (await admit_request(redis, asked)).outcome == "admitted"
    await create_logs(redis)
    await publish_plan(redis, f"5-{number}", [(asked.request_id, 1, 0)])


def packed(number: int, first: int = 0) -> bytes:
    return b"".join(RECORD.pack(first + i, -1.0) for i in range(number))


async def total(redis: Redis) -> Counter[str]:
    """What was used in this hour, which is what was used in this month."""
    now = datetime.now(UTC)
    found = [await read(redis, now, now) for read in (read_hours, read_months)]
    hours, months = ({row[1:-1]: row.used for row in rows} for rows in found)
    assert hours == months
    return sum(hours.values(), Counter[str]())


def numbers(prompt: int, cached: int, generated: int) -> Counter[str]:
    """What one request has used."""
    return Counter(requests=1, prompt_tokens=prompt, cached_tokens=cached, completion_tokens=generated)


async def end_used(redis: Redis, sequence: int, number: int, name: str = "r1", why: str = "length") -> None:
    terminals = [flushed_end(terminal_for(name, why, number), packed(number))]
    assert await flush(redis, sequence, terminals=terminals) == ("OK", [])


async def test_spilled_tokens_are_counted_and_again_by_nobody(redis: Redis) -> None:
    await run(redis, request())
    for _ in range(2):
        await flush(redis, 1, spills=[("r1", 0, packed(3))])
        assert (await total(redis))["completion_tokens"] == 3
    await flush(redis, 2, spills=[("r1", 24, packed(2, 3))])
    await end_used(redis, 3, 9)
    assert await total(redis) == numbers(20, 16, 9)


async def test_what_a_dead_worker_has_left_is_counted_when_it_is_saved(redis: Redis) -> None:
    await run(redis, request())
    await flush(redis, 1, spills=[("r1", 0, packed(3))])
    for _ in range(2):
        await save(redis, "w1", 1, 24, packed(4, 3))
        assert await total(redis) == numbers(20, 16, 7)
    await publish_plan(redis, "5-2", [("r1", 2, 7)])
    call = batcher_scripts.finish(
        KEYS, terminal_for("r1", "timeout", 7), own_epoch=5, kept_ms=1000, channel="", payload=b""
    )
    assert await run_script(redis, call) == "OK"
    assert (await total(redis))["completion_tokens"] == 7


async def test_tokens_that_needed_no_step_are_counted_by_their_attempt(redis: Redis) -> None:
    """Each says how many it had so far; what its log had beyond is saved after its death."""
    await run(redis, request())
    count = FlushedRow("r1", 1, 0, (6,), num_speculated=2)
    for sequence in (1, 2):
        await flush(redis, sequence, counts=[count])
        assert (await total(redis))["speculated_tokens"] == 2
    await flush(redis, 3, counts=[count._replace(fields=(9,), num_speculated=4)])
    await save(redis, "w1", 1, 0, packed(12), num_speculated=1)
    await publish_plan(redis, "5-2", [("r1", 2, 12)])
    ended = flushed_end(terminal_for("r1", "length", 20), packed(20))
    ended = ended._replace(attempt=2, base=12, num_speculated=3)
    await flush(redis, 4, terminals=[ended])
    used_in_all = await total(redis)
    assert (used_in_all["completion_tokens"], used_in_all["speculated_tokens"]) == (20, 4 + 1 + 3)


async def test_tokens_that_were_shown_are_counted_by_a_broker_that_lost_them(redis: Redis) -> None:
    shown = replace(request(), num_shown=6)

    async def offer() -> str:
        call = request_scripts.offer(
            KEYS,
            shown,
            made_by="w1",
            made_in=1,
            records=packed(6),
            prompt_records=b"",
            num_cached=16,
            reopen=False,
            answer=b"",
            reader=0,
            connection=0,
        )
        return (await run_script(redis, call)).outcome

    assert await offer() == "queued"
    assert await offer() == "kept"
    await create_logs(redis)
    await end_used(redis, 1, 6)
    assert await total(redis) == numbers(20, 16, 6)


async def test_owners_beyond_the_bound_are_counted_together(redis: Redis) -> None:
    hour = Keys.usage_hour(int(time.time()) // 3600)
    others: dict[Any, Any] = {f"a\n{i}\nm\nprompt": 1 for i in range(60_000)}
    await redis.hset(hour, mapping=others)  # type: ignore[misc]
    await run(redis, request())
    await end_used(redis, 1, 5)
    assert await redis.hget(hour, "\n*\n*\ngenerated") == b"5"  # type: ignore[misc]
    assert await redis.hget(hour, "k\nt\nm\ngenerated") is None  # type: ignore[misc]


@pytest.mark.parametrize("day", ["2000-02-29", "2026-12-31", "2028-03-01", "2100-02-28"])
async def test_months_are_those_of_the_calendar(redis: Redis, day: str) -> None:
    time_s = datetime.fromisoformat(day).replace(tzinfo=UTC).timestamp() + 86_399
    script = load_script("lib/usage") + "return load_usage().month_of(tonumber(ARGV[1]))"
    assert await redis.eval(script, 0, str(time_s)) == day[:7].encode()  # type: ignore[misc]


# --- budgets ------------------------------------------------------------------------------------------------


def limited(name: str, budget_tokens: int = 0, **fields: Any) -> Generate:
    return request(name, account=replace(ACCOUNT, budget_tokens=budget_tokens), **fields)


async def test_what_a_request_has_not_used_is_given_back_at_its_end(redis: Redis) -> None:
    await run(redis, limited("r1", 30))
    assert (await admit_request(redis, limited("r2", 30))).outcome == "budget"
    await end_used(redis, 1, 0, why="client")
    assert (await admit_request(redis, limited("r2", 30))).outcome == "admitted"
    assert await redis.hgetall(Keys.usage_pending) == {b"k tokens": b"21"}  # type: ignore[misc]


async def test_a_beam_search_sets_all_that_it_may_make_aside(redis: Redis) -> None:
    beams = replace(limited("r1", 2050), beams=BeamParams(2, num_returned=2))
    assert (await admit_request(redis, beams)).outcome == "admitted"
    assert (await admit_request(redis, limited("r2", 2050))).outcome == "admitted"
    assert (await admit_request(redis, limited("r3", 2050))).outcome == "budget"


async def test_of_a_beam_search_the_key_pays_for_what_is_returned(redis: Redis) -> None:
    await run(redis, limited("r1", 2050))
    await redis.hset(KEYS.request("r1"), mapping={"key": "rates", "reserved": "9"})  # type: ignore[misc]
    await redis.hset("rates", "tokens", "1")  # type: ignore[misc]
    end = flushed_end(Terminal("r1", "length", 7), packed(7), num_used=5)
    assert await flush(redis, 1, terminals=[end]) == ("OK", [])
    assert (await total(redis))["completion_tokens"] == 5
    assert await redis.hget("rates", "tokens") == b"5"  # type: ignore[misc]


# --- months -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("now", "begin", "following"),
    [
        ("2026-11-30T23:59:59", "2026-11", "2026-12"),
        ("2026-12-01T00:00:00", "2026-12", "2027-01"),
        ("2028-02-29T12:00:00", "2028-02", "2028-03"),
    ],
)
def test_a_month_ends_where_the_next_begins(now: str, begin: str, following: str) -> None:
    time_s = datetime.fromisoformat(now).replace(tzinfo=UTC).timestamp()
    assert [month_name(month_begin(time_s, later)) for later in (0, 1)] == [begin, following]
    assert month_begin(time_s + seconds_to_next_month(time_s)) == month_begin(time_s, 1)
