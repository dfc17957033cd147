"""Steps as text, terminals, log entries and logits."""

from collections.abc import Awaitable
from typing import cast

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError

from common.broker.committed import read, read_logits
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
from common.messages.request import BeamParams, LogitsParams
from gpu_worker.agent.agent import Agent
from gpu_worker.agent.publish import Publisher
from tests.support.agents import (
    CHANNEL,
    KEYS,
    PROMPT,
    grants,
    hset,
    prompt_logprobs,
    reports,
    start,
    step,
)
from tests.support.broker.listening import listening
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


async def test_a_resumed_row_continues_text_and_stop_string(agent: Agent, redis: Redis) -> None:
    the, sea = ids_of(" the sea")
    await start(agent, committed=RECORD.pack(the, -1.0), stop=["the sea"])
    assert unpack_ids(grants(agent)[-1].starts[0].ids) == [*PROMPT, the]
    step(agent, {1: (1, sea)})
    await agent.flusher.flush()
    assert unpack_records(await redis.get(KEYS.tokens("r1")))[0] == [the, sea]
    assert await redis.hget(KEYS.request("r1"), "terminal") == b"stop_sequence"  # type: ignore[misc]


async def test_a_row_that_starts_behind_its_stop_string_ends(agent: Agent, redis: Redis) -> None:
    """The broker may know the tokens that a client was shown, and not the end that followed."""
    the, sea = ids_of(" the sea")
    await start(agent, committed=RECORD.pack(the, -1.0) + RECORD.pack(sea, -1.0), stop=["the sea"])
    assert grants(agent)[-1].stops == [(1, "stop_sequence")]
    step(agent, {1: (2, the)})
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


async def test_a_prompt_of_one_token_has_no_logprobs(agent: Agent, redis: Redis) -> None:
    await start(agent, prompt_logprobs=0, prompt_ids=pack_ids([3]))
    step(agent, {1: (0, 9)}, prefilled=[(1, 1)])
    await agent.flusher.flush()
    assert (await read(PoolClient(redis, KEYS), ["r1"]))["r1"].prompt == b""


async def test_prompt_logprobs_are_committed_once(agent: Agent, redis: Redis) -> None:
    """By the attempt that samples the first token; a row that ends before that writes none."""
    await start(agent, prompt_logprobs=0)
    step(agent, prompt_logprobs=[prompt_logprobs(1, -1.0)], ended=[(1, "preempted", 0)], released=[(1, 1)])
    await agent.flusher.flush()
    assert (await read(PoolClient(redis, KEYS), ["r1"]))["r1"].prompt is None
    await start(agent, row=2, prompt_logprobs=0, committed=RECORD.pack(5, -1.0))
    assert grants(agent)[-1].starts[0].prompt_logprobs is None
    step(agent, {2: (1, 6)}, prefilled=[(2, 3)])
    await agent.flusher.flush()
    assert (await read(PoolClient(redis, KEYS), ["r2"]))["r2"].prompt is None


async def test_rows_that_do_not_ask_for_prompt_logprobs_get_none(agent: Agent, redis: Redis) -> None:
    await start(agent)
    assert grants(agent)[-1].starts[0].prompt_logprobs is None
    step(agent, {1: (0, 9)}, prefilled=[(1, 2)])
    await agent.flusher.flush()
    assert b"prompt" not in await cast(Awaitable[dict[bytes, bytes]], redis.hgetall(KEYS.request("r1")))


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
    assert grants(agent)[-1].starts[0].logits == (0, 4, "float32")
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


async def test_logits_of_the_generation_alone_begin_at_the_last_token_of_the_prompt(
    agent: Agent, redis: Redis
) -> None:
    logits = LogitsParams(False, True, "bfloat16", 4)
    await start(agent, logits=logits, prompt_ids=pack_ids([3, 4, 5]), committed=RECORD.pack(7, -1.0))
    assert grants(agent)[-1].starts[0].logits == (2, 12, "bfloat16")
    step(agent, {1: (1, 9)}, logits=[rows(2, 2)], prefilled=[(1, 4)])
    await agent.flusher.flush()
    assert await written(redis, 2) == [2, 3]


async def test_pieces_are_written_once_although_a_call_fails(
    agent: Agent, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures, write = [0, 1, 1, 0, 0, 0], Publisher.write_logits

    async def failing(self: Publisher, piece: object) -> int:
        reply = await write(self, piece)  # type: ignore[arg-type]
        if failures.pop(0):
            raise ConnectionError("the answer is lost")
        return reply

    monkeypatch.setattr(Publisher, "write_logits", failing)
    await start(agent, logits=LOGITS, prompt_ids=pack_ids([3, 4]))
    step(agent, {1: (0, 9)}, logits=[rows(0, 1), rows(1, 1)], prefilled=[(1, 2)])
    step(agent, {1: (1, 9)}, logits=[rows(2, 1)])
    await agent.flusher.flush()
    assert await written(redis, 3) == [0, 1, 2] and await redis.llen(KEYS.logits("r1")) == 3  # type: ignore[misc]
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
    assert agent.state.outbox.ended == [(1, "preempted", 2)]
    await agent.flusher.flush()
    assert len(await redis.get(KEYS.tokens("r1"))) == 2 * RECORD.size


async def test_a_row_of_another_worker_is_dropped(agent: Agent, redis: Redis) -> None:
    await start(agent, logits=LOGITS, prompt_ids=pack_ids([3, 4]))
    await redis.hset(KEYS.request("r1"), mapping={"worker": "w1-1", "attempt": 2})  # type: ignore[misc]
    step(agent, logits=[rows(0, 1)])
    await agent.flusher.flush()
    assert grants(agent)[-1].stops == [(1, "preempted")] and not await redis.exists(KEYS.logits("r1"))


async def test_rows_without_logits_write_none(agent: Agent, redis: Redis) -> None:
    await start(agent)
    assert grants(agent)[-1].starts[0].logits is None
    step(agent, {1: (0, 9)}, prefilled=[(1, 2)])
    assert not agent.state.outbox.logits


async def test_a_beam_search_publishes_its_sequences_with_its_end_and_nothing_before(
    agent: Agent, redis: Redis
) -> None:
    """Its stop strings are the engine's business, and none of its blocks but the prompt's gets a name."""
    packed = pack_sequences(
        [BeamSequence([5, 6], [-0.5, -0.25], -0.375, "eos_token"), BeamSequence([7], [-1.0], -1.0, "length")]
    )
    async with listening(redis, CHANNEL) as published:
        await start(agent, beams=BeamParams(2), stop=["sea"], block_hashes=b"h" * 16)
        assert grants(agent)[-1].starts[0].beams == BeamParams(2)
        step(agent, prefilled=[(1, 2)])
        step(agent, num_beams=2)
        await agent.flusher.flush()
        assert await redis.get(KEYS.tokens("r1")) is None
        row = agent.state.table.rows[1]
        assert (row.held.base, row.held.num_tokens, row.held.kv_len) == (0, 0, 2)
        step(agent, num_beams=2, sequences=[(1, packed)], ended=[(1, "eos_token", 2)], released=[(1, 6)])
        await agent.flusher.flush()
        events = [decode(Events, message) for message in await published()]
    assert await redis.get(KEYS.tokens("r1")) == packed
    assert not any(event.tokens for event in events)
    [end] = [end for event in events for end in event.terminals]
    assert (end.reason, end.num_tokens) == ("eos_token", 5)
    (_, report) = await reports(redis)
    assert (report.ended, report.released, report.hashes) == ([(1, "eos_token", 2)], [(1, 6)], [])
