"""Steps as text, ends, log-probabilities, logits, beams, budgets of API keys and counts."""

import math
import time
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError

from api.requests.metrics import month_begin, month_name
from api.streams.relay import read_logits
from common.broker.committed import read
from common.broker.keys import Keys
from common.broker.lua import ScriptCall
from common.broker.pool_client import PoolClient
from common.messages.codec import decode
from common.messages.events import Events
from common.messages.records import (
    RECORD,
    BeamSequence,
    pack_floats,
    pack_ids,
    pack_sequences,
    unpack_floats,
    unpack_ids,
    unpack_records,
)
from common.messages.request import BeamParams, LogitsParams, UsageAccount
from common.metrics import catalogue
from common.metrics.catalogue import TOTAL
from gpu_worker.agent.agent import Agent
from gpu_worker.agent.engine_client import BatchMetrics
from gpu_worker.protocol import SAMPLE, StepResult
from tests.support.agents import (
    CHANNEL,
    PROMPT,
    grants,
    hset,
    plan,
    prompt_logprobs,
    reports,
    start,
    step,
)
from tests.support.broker.listening import listening
from tests.support.broker_state import KEYS
from tests.support.engine.row_steps import plan as plan_of
from tests.support.engine.row_steps import start_row as new_row
from tests.support.tokenizer import ids as ids_of

LOGITS = LogitsParams(True, True, "float32", 2)


async def test_a_stop_string_ends_a_row_at_once_and_later_tokens_are_dropped(
    agent: Agent, redis: Redis
) -> None:
    await start(agent, stop=["sea"])
    the, sea = ids_of(" the sea")
    step(agent, {1: (0, the)})
    step(agent, {1: (1, sea)})
    assert grants(agent)[-1].stops == [(1, "stop_sequence")] and grants(agent)[-1].prefill_tokens == 64
    step(agent, {1: (2, the)})
    step(agent, ended=[(1, "stop_sequence", 3)], released=[(1, 4)])
    await agent.flusher.flush()
    assert unpack_records(await redis.get(KEYS.tokens("r1")))[0] == [the, sea]
    (report,) = await reports(redis)
    assert report.ended == [(1, "stop_sequence", 2)]


@pytest.mark.parametrize("num_known", [1, 2])
async def test_a_resumed_row_continues_text_and_stop_string(
    agent: Agent, redis: Redis, num_known: int
) -> None:
    """The broker may know all tokens that a client was shown, and not the end that followed."""
    the, sea = ids_of(" the sea")
    known = [RECORD.pack(token, -1.0) for token in (the, sea)[:num_known]]
    await start(agent, committed=b"".join(known), stop=["the sea"])
    starts, stops = grants(agent)[-1].starts, grants(agent)[-1].stops
    begun = [unpack_ids(one.ids) for one in starts]
    assert (begun, stops) == (([[*PROMPT, the]], []) if num_known == 1 else ([], [(1, "stop_sequence")]))
    step(agent, {1: (num_known, (sea, the)[num_known - 1])})
    await agent.flusher.flush()
    assert unpack_records(await redis.get(KEYS.tokens("r1")))[0] == [the, sea]
    assert await redis.hget(KEYS.request("r1"), "terminal") == b"stop_sequence"  # type: ignore[misc]


async def test_top_logprobs_follow_the_order_of_the_tokens(agent: Agent, redis: Redis) -> None:
    """Also where a flush has several steps."""
    async with listening(redis, CHANNEL) as published:
        await start(agent, row=1, top_n_tokens=2)
        await start(agent, row=2)
        for index in range(2):
            top = pack_ids([7 + index, 3]), pack_floats([-0.25, float("-inf")])
            step(agent, {2: (index, 4), 1: (index, 5 + index)}, top_logprobs=[(1, *top)])
        await agent.flusher.flush()
        [events] = [decode(Events, message) for message in await published()]
    second, first = events.all_tokens
    assert (unpack_ids(first.ids), unpack_ids(first.top_ids)) == ([5, 6], [7, 3, 8, 3])
    assert (
        unpack_floats(first.logprobs) == [-0.5, -0.5]
        and unpack_floats(first.top_logprobs) == [-0.25, float("-inf")] * 2
    )
    assert (unpack_ids(second.ids), second.top_ids) == ([4, 4], b"")
    await hset(redis, KEYS.request("r1"), {"width": 3})
    committed = (await read(PoolClient(redis, KEYS), ["r1"]))["r1"]
    assert unpack_records(committed.records, 3)[2] == [
        [(7, -0.25), (3, float("-inf"))],
        [(8, -0.25), (3, float("-inf"))],
    ]


async def test_prompt_logprobs_are_committed_with_the_first_token(agent: Agent, redis: Redis) -> None:
    """All of them, however many chunks the prompt was computed in."""
    await start(agent, prompt_logprobs=1, prompt_ids=pack_ids([3, 4, 5, 6]))
    assert grants(agent)[-1].starts[0].prompt_logprobs == 1
    step(agent, prompt_logprobs=[prompt_logprobs(1, -1.0)])
    await agent.flusher.flush()
    assert (await read(PoolClient(redis, KEYS), ["r1"]))["r1"].prompt is None
    step(agent, {1: (0, 9)}, prompt_logprobs=[prompt_logprobs(2, -2.0, -3.0)], prefilled=[(1, 4)])
    step(agent, {1: (1, 9)})
    await agent.flusher.flush()
    state = (await read(PoolClient(redis, KEYS), ["r1"]))["r1"]
    assert state.num_tokens == 2
    assert unpack_records(state.prompt or b"", 2) == ([4, 5, 6], [-1.0, -2.0, -3.0], [[(7, -0.25)]] * 3)


# --- logits -------------------------------------------------------------------------------------------------


def rows(first: int, count: int) -> tuple[int, int, bytes]:
    """Logits of row 1 at some positions: each has its own byte."""
    return (
        1,
        first,
        b"".join(bytes([position]) * LOGITS.row_bytes for position in range(first, first + count)),
    )


async def written(redis: Redis, num_rows: int) -> list[int] | None:
    found = await read_logits(PoolClient(redis, KEYS), "r1", num_rows * LOGITS.row_bytes)
    return None if found is None else list(found[:: LOGITS.row_bytes])


async def test_logits_are_written_before_their_tokens(agent: Agent, redis: Redis) -> None:
    """Those of a prompt's first chunks, too, which bring no token; those after the end are dropped."""
    await start(agent, logits=LOGITS, prompt_ids=pack_ids([3, 4, 5]), max_new_tokens=2)
    step(agent, logits=[rows(0, 2)])
    assert not agent.state.outbox.is_empty and not agent.flusher.can_start
    await agent.flusher.flush()
    assert await written(redis, 2) == [0, 1] and await written(redis, 3) is None
    step(agent, {1: (0, 9)}, logits=[rows(2, 1)], prefilled=[(1, 3)])
    step(agent, {1: (1, 8)}, logits=[rows(3, 1)], ended=[(1, "length", 2)], released=[(1, 4)])
    step(agent, logits=[rows(4, 1)])
    await agent.flusher.flush()
    assert await written(redis, 4) == [0, 1, 2, 3] and await written(redis, 5) is None
    assert (await read(PoolClient(redis, KEYS), ["r1"]))["r1"].terminal == "length"


async def test_pieces_are_written_once_although_a_call_fails(
    agent: Agent, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures, run = [0, 1, 1, 0, 0], PoolClient.run

    async def failing(self: PoolClient, call: ScriptCall[Any]) -> Any:
        reply = await run(self, call)
        if failures and failures.pop(0):
            raise ConnectionError("the answer is lost")
        return reply

    monkeypatch.setattr(PoolClient, "run", failing)
    await start(agent, logits=LOGITS, prompt_ids=pack_ids([3, 4]))
    step(agent, {1: (0, 9)}, logits=[rows(0, 1), rows(1, 1)], prefilled=[(1, 2)])
    step(agent, {1: (1, 9)}, logits=[rows(2, 1)])
    await agent.flusher.flush()
    assert await written(redis, 3) == [0, 1, 2] and await redis.llen(KEYS.logits("r1")) == 3  # type: ignore[misc]
    assert not failures
    assert (await read(PoolClient(redis, KEYS), ["r1"]))["r1"].num_tokens == 2


async def test_a_row_whose_logits_are_lost_is_preempted(agent: Agent, redis: Redis) -> None:
    """Its tokens stay, and its next attempt computes all logits."""
    await start(agent, logits=LOGITS, prompt_ids=pack_ids([3, 4]))
    step(agent, {1: (0, 9)}, logits=[rows(0, 2)], prefilled=[(1, 2)])
    await agent.flusher.flush()
    await redis.delete(KEYS.logits("r1"))
    step(agent, {1: (1, 8)}, logits=[rows(2, 1)])
    await agent.flusher.flush()
    assert grants(agent)[-1].stops == [(1, "preempted")]
    assert agent.state.outbox.report.ended == [(1, "preempted", 2)]
    await agent.flusher.flush()
    assert len(await redis.get(KEYS.tokens("r1"))) == 2 * RECORD.size


async def test_a_beam_search_publishes_its_sequences_with_its_end_and_nothing_before(
    agent: Agent, redis: Redis
) -> None:
    """Its stop strings are the engine's business, and none of its blocks but the prompt's gets a name."""
    packed = pack_sequences(
        [BeamSequence([5, 6], [-0.5, -0.25], -0.375, "eos_token"), BeamSequence([7], [-1.0], -1.0, "length")]
    )
    async with listening(redis, CHANNEL) as published:
        await start(agent, beams=BeamParams(2), stop=["sea"], block_hashes=b"h" * 16)
        assert grants(agent)[-1].starts[0].request.beams == BeamParams(2)
        step(agent, prefilled=[(1, 2)])
        step(agent, num_beams=2)
        await agent.flusher.flush()
        assert await redis.get(KEYS.tokens("r1")) is None
        row = agent.state.rows[1]
        assert (row.held.base, row.held.num_tokens, row.held.kv_len) == (0, 0, 2)
        await redis.hset(KEYS.request("r1"), mapping={"key": "rates", "reserved": "9"})  # type: ignore[misc]
        await redis.hset("rates", "tokens", "0")  # type: ignore[misc]
        step(agent, num_beams=2, sequences=[(1, packed)], ended=[(1, "eos_token", 2)], released=[(1, 6)])
        await agent.flusher.flush()
        events = [decode(Events, message) for message in await published()]
    assert await redis.get(KEYS.tokens("r1")) == packed
    assert not any(event.tokens for event in events)
    [end] = [end for event in events for end in event.terminals]
    assert (end.reason, end.num_tokens) == ("eos_token", 5)
    assert await redis.hget("rates", "tokens") == b"7", "it returns one sequence"  # type: ignore[misc]
    (_, report) = await reports(redis)
    assert (report.ended, report.released, report.hashes) == ([(1, "eos_token", 2)], [(1, 6)], [])


def step_of(agent: Agent, row: int, first: int, tokens: list[int], **fields: object) -> None:
    """One step that sampled several tokens of a row."""
    samples = b"".join(SAMPLE.pack(row, first + i, token, -0.5) for i, token in enumerate(tokens))
    agent.steps.apply(StepResult(agent.state.step + 1, samples, **fields))  # type: ignore[arg-type]


async def prefilled(agent: Agent, row: int = 1) -> None:
    await start(agent, row, max_new_tokens=100)
    step(agent, {row: (0, 5)}, prefilled=[(row, len(PROMPT))])


async def test_reports_say_how_long_a_row_is_that_is_ahead(agent: Agent, redis: Redis) -> None:
    await prefilled(agent, 1)
    await prefilled(agent, 2)
    await agent.flusher.flush()
    step_of(agent, 1, 1, [6, 7, 8])
    step_of(agent, 2, 1, [6])
    step_of(agent, 2, 2, [7])
    agent.flusher.reported_s = -math.inf
    await agent.flusher.flush()
    agent.flusher.reported_s = -math.inf
    await agent.flusher.flush()
    _, second, third = await reports(redis)
    assert second.lengths == [(1, len(PROMPT) + 3, 5)] and third.lengths == []
    agent.plans.apply(plan(agent, takeover=True))
    step_of(agent, 1, 4, [6, 7])
    await agent.flusher.flush()
    held = {row.row: (row.kv_len, row.step) for row in (await reports(redis))[-1].held}
    assert held == {1: (len(PROMPT) + 5, 6), 2: (len(PROMPT), 2)}


async def test_reports_say_how_long_a_row_is_that_misses_steps(agent: Agent, redis: Redis) -> None:
    """As where batches, adapters or missing blocks let it wait. Else it got blocks as if it had grown."""
    for row in (1, 2):
        await prefilled(agent, row)
    for index in range(1, 33):
        step_of(agent, 1, index, [6])
        if index in (15, 16, 31, 32):
            agent.flusher.reported_s = -math.inf
        await agent.flusher.flush()
    found = [(report.step, [row for row, *_ in report.lengths]) for report in await reports(redis)]
    assert [one for one in found if one[1]] == [(18, [2]), (34, [2])]


async def test_a_report_is_due_when_a_row_that_is_ahead_has_filled_half_of_its_blocks(
    agent: Agent, redis: Redis
) -> None:
    await prefilled(agent)
    agent.plans.apply(plan(agent, blocks=[(1, pack_ids([2]))]))
    await agent.flusher.flush()
    assert len(await reports(redis)) == 1
    step_of(agent, 1, 1, [5] * 13)
    await agent.flusher.flush()
    assert len(await reports(redis)) == 1, "17 slots are left for 31 steps, of which half may go on"
    step_of(agent, 1, 14, [5, 5])
    await agent.flusher.flush()
    assert (await reports(redis))[-1].lengths == [(1, len(PROMPT) + 15, 3)]


async def test_a_stop_string_comes_before_an_end_that_the_same_step_brought_behind_it(
    agent: Agent, redis: Redis
) -> None:
    await start(agent, stop=["sea"])
    the, sea = ids_of(" the sea")
    step_of(agent, 1, 0, [the, sea, the, 2], ended=[(1, "eos_token", 4)], released=[(1, 5)])
    await agent.flusher.flush()
    assert unpack_records(await redis.get(KEYS.tokens("r1")))[0] == [the, sea]
    (report,) = await reports(redis)
    assert report.ended == [(1, "stop_sequence", 2)] and report.lengths == []
    assert grants(agent)[-1].stops == [(1, "stop_sequence")]


async def start_rows(agent: Agent, budget: int, *rows: int) -> None:
    """Start rows with prompts of two tokens; their one API key has this budget."""
    account = UsageAccount("m", budget_tokens=budget)
    for row in rows:
        await start(agent, row, account=account, key_id="k", max_new_tokens=100)
        request = agent.state.rows[row].request
        await hset(agent.pool.redis, KEYS.request(f"r{row}"), {"account": request.account_text})


async def publish_step(agent: Agent, index: int, *rows: int) -> None:
    step(agent, dict.fromkeys(rows, (index, 5 + index)))
    await agent.flusher.flush()


async def ends(redis: Redis, *rows: int) -> list[tuple[bytes | None, bytes | None, int]]:
    """Reason, number of tokens, and tokens kept, of each request."""
    return [
        (
            *(await redis.hmget(KEYS.request(f"r{row}"), ["terminal", "num_tokens"])),  # type: ignore[misc]
            len(unpack_records(await redis.get(KEYS.tokens(f"r{row}")) or b"")[0]),
        )
        for row in rows
    ]


async def spent(redis: Redis) -> int:
    month = month_name(month_begin(time.time()))
    return int(await redis.hget(Keys.usage_spent(month), "k tokens") or 0)  # type: ignore[misc]


async def test_a_row_ends_at_the_budget_with_what_it_has(agent: Agent, redis: Redis) -> None:
    """The prompt and three tokens are the budget. The token of the next step is dropped."""
    await start_rows(agent, 5, 1)
    for index in range(4):
        await publish_step(agent, index, 1)
    assert await ends(redis, 1) == [(b"budget", b"3", 3)]
    assert await spent(redis) == 5
    assert grants(agent)[-1].stops == [(1, "budget")]
    assert [report.ended for report in await reports(redis)][-1] == [(1, "budget", 3)]
    assert not agent.state.budget_keys


async def test_all_rows_of_a_key_share_what_is_left(agent: Agent, redis: Redis) -> None:
    """Two prompts and two first tokens are 6. Of three more, the first row gets two."""
    await start_rows(agent, 9, 1, 2)
    for index in range(4):
        await publish_step(agent, index, 1, 2)
    assert await spent(redis) == 9
    assert await ends(redis, 1, 2) == [(b"budget", b"3", 3), (b"budget", b"2", 2)]


async def test_a_row_that_ends_beyond_the_budget_ends_at_it(agent: Agent, redis: Redis) -> None:
    await start_rows(agent, 4, 1)
    await publish_step(agent, 0, 1)
    step(agent, {1: (1, 6)})
    step(agent, {1: (2, 7)}, ended=[(1, "eos_token", 3)])
    await agent.flusher.flush()
    assert await ends(redis, 1) == [(b"budget", b"2", 2)]
    assert [report.ended for report in await reports(redis)][-1] == [(1, "budget", 2)]


async def test_the_first_token_was_set_aside_at_admission(agent: Agent, redis: Redis) -> None:
    """A request that was admitted in time gets it, although others have used the budget since."""
    await start_rows(agent, 5, 1, 2)
    for index in range(3):
        await publish_step(agent, index, 1)
    await publish_step(agent, 0, 2)
    await publish_step(agent, 1, 2)
    assert await ends(redis, 2) == [(b"budget", b"1", 1)]


def test_steps_beside_a_row_that_stands_by_are_those_that_they_are() -> None:
    counts = catalogue.BATCH_COUNT.values
    before = {method: counts[method,] for method in ("prefill", "decode")}
    metrics = BatchMetrics()
    starts = [new_row(number, [0, 0], 9, blocks=[0]) for number in (1, 2)]
    metrics.on_plan(plan_of(9, 8, starts, max_rows=1), 0.0)
    chunk = StepResult(1, prefill_tokens=7, duration_ms=2.0)
    last = StepResult(2, prefilled=[(1, 8)], duration_ms=2.0)
    metrics.on_steps([chunk, last, *(StepResult(step, duration_ms=2.0) for step in (3, 4, 5))], 0.005)
    assert counts["decode",] == before["decode"], "a step costs nothing by itself"
    metrics.count_steps()
    metrics.count_steps()
    assert {method: counts[method,] - before[method] for method in before} == {"prefill": 2, "decode": 3}


def test_each_row_of_a_step_counts_what_speculation_gave_it() -> None:
    metrics, skipped = BatchMetrics(), catalogue.SKIPPED_TOKENS.series[()]
    before = dict(skipped)
    accepted, proposed = (
        metric.values["suffix",] for metric in (catalogue.ACCEPTED_TOKENS, catalogue.PROPOSED_TOKENS)
    )
    second = catalogue.ACCEPTED_AT.values["1",]
    plain = StepResult(1, samples=packed([(1, 1), (2, 1)]))
    guessed = packed([(1, 2), (1, 3), (1, 4), (2, 2)])
    metrics.on_steps(
        [plain, StepResult(2, samples=guessed, proposals=[("suffix", 3, 2), ("suffix", 1, 0)])], 0.0
    )
    metrics.count_steps()
    changed = {bound: number - before.get(bound, 0) for bound, number in skipped.items()}
    assert {bound: number for bound, number in changed.items() if number} == {0.0: 3, 2.0: 1, TOTAL: 2}
    assert catalogue.ACCEPTED_TOKENS.values["suffix",] == accepted + 2
    assert catalogue.PROPOSED_TOKENS.values["suffix",] == proposed + 4
    assert catalogue.ACCEPTED_AT.values["1",] == second + 1


def packed(places: list[tuple[int, int]]) -> bytes:
    """Samples of (row, index)."""
    return b"".join(SAMPLE.pack(row, index, 5, -0.5) for row, index in places)
