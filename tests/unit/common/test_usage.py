"""Usage: each committed token is counted once, and the prompt with the first; budgets of API keys; months."""

import time
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from redis.asyncio import Redis

from api.requests import request_scripts
from api.requests.metrics import month_begin, month_name, read_hours, read_months, seconds_to_next_month
from api.requests.request_scripts import AdmitReply
from batcher import batcher_scripts
from common.broker.keys import Keys
from common.broker.lua import load_script, run_script
from common.messages.events import terminal_for
from common.messages.records import RECORD, pack_ids
from common.messages.request import BeamParams, Generate, StoppingParams, UsageAccount
from gpu_worker.worker_scripts import FlushedRow
from tests.support.scripts import KEYS, admit_request, create_logs, flush, flushed_end, publish_plan, save

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


async def admit(redis: Redis, asked: Generate) -> AdmitReply:
    return await admit_request(redis, asked, b"x")


async def start(redis: Redis, asked: Generate, number: int = 1) -> None:
    """Admit a request and place it on the worker, which finds 16 tokens of its prompt cached."""
    assert (await admit(redis, asked)).outcome == "admitted"
    await create_logs(redis)
    await publish_plan(redis, f"5-{number}", [(asked.request_id, 1, 0)])


def records(number: int, first: int = 0) -> bytes:
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


async def end(redis: Redis, sequence: int, number: int, name: str = "r1", why: str = "length") -> None:
    terminals = [flushed_end(terminal_for(name, why, number), records(number))]
    assert await flush(redis, sequence, terminals=terminals) == ("OK", [])


async def test_spilled_tokens_are_counted_and_again_by_nobody(redis: Redis) -> None:
    await start(redis, request())
    for _ in range(2):
        await flush(redis, 1, spills=[("r1", 0, records(3))])
        assert (await total(redis))["completion_tokens"] == 3
    await flush(redis, 2, spills=[("r1", 24, records(2, 3))])
    await end(redis, 3, 9)
    assert await total(redis) == numbers(20, 16, 9)


async def test_what_a_dead_worker_has_left_is_counted_when_it_is_saved(redis: Redis) -> None:
    await start(redis, request())
    await flush(redis, 1, spills=[("r1", 0, records(3))])
    for _ in range(2):
        await save(redis, "w1", 1, 24, records(4, 3))
        assert await total(redis) == numbers(20, 16, 7)
    await publish_plan(redis, "5-2", [("r1", 2, 7)])
    call = batcher_scripts.finish(
        KEYS, terminal_for("r1", "timeout", 7), records=b"", kept_ms=1000, channel="", payload=b""
    )
    assert await run_script(redis, call)
    assert (await total(redis))["completion_tokens"] == 7


async def test_tokens_that_needed_no_step_are_counted_by_their_attempt(redis: Redis) -> None:
    """Each says how many it had so far; what its log had beyond is saved after its death."""
    await start(redis, request())
    count = FlushedRow("r1", 1, 0, (6,), num_speculated=2)
    for sequence in (1, 2):
        await flush(redis, sequence, counts=[count])
        assert (await total(redis))["speculated_tokens"] == 2
    await flush(redis, 3, counts=[count._replace(fields=(9,), num_speculated=4)])
    await save(redis, "w1", 1, 0, records(12), num_speculated=1)
    await publish_plan(redis, "5-2", [("r1", 2, 12)])
    ended = flushed_end(terminal_for("r1", "length", 20), records(20))
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
            records=records(6),
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
    await end(redis, 1, 6)
    assert await total(redis) == numbers(20, 16, 6)


async def test_owners_beyond_the_bound_are_counted_together(redis: Redis) -> None:
    hour = Keys.usage_hour(int(time.time()) // 3600)
    others: dict[Any, Any] = {f"a\n{i}\nm\nprompt": 1 for i in range(60_000)}
    await redis.hset(hour, mapping=others)  # type: ignore[misc]
    await start(redis, request())
    await end(redis, 1, 5)
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
    await start(redis, limited("r1", 30))
    assert (await admit(redis, limited("r2", 30))).outcome == "budget"
    await end(redis, 1, 0, why="client")
    assert (await admit(redis, limited("r2", 30))).outcome == "admitted"
    assert await redis.hgetall(Keys.usage_pending) == {b"k tokens": b"21"}  # type: ignore[misc]


async def test_a_beam_search_sets_all_that_it_may_make_aside(redis: Redis) -> None:
    beams = replace(limited("r1", 2050), beams=BeamParams(2, num_returned=2))
    assert (await admit(redis, beams)).outcome == "admitted"
    assert (await admit(redis, limited("r2", 2050))).outcome == "admitted"
    assert (await admit(redis, limited("r3", 2050))).outcome == "budget"


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
