"""Steps that bring a row several tokens: what the batcher learns of its length, and where the row ends."""

import math

from redis.asyncio import Redis

from common.messages.records import pack_ids, unpack_records
from gpu_worker.agent.agent import Agent
from gpu_worker.protocol import SAMPLE, StepResult
from tests.support.agents import KEYS, PROMPT, grants, plan, reports, start, step
from tests.support.tokenizer import ids as ids_of


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
