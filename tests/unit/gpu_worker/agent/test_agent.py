"""The agent between a batcher and an engine that are not there: what it hands on, and what it publishes."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from common import model_files
from common.broker import client as brokers
from common.broker.committed import read
from common.broker.keys import Keys
from common.messages.codec import decode, encode
from common.messages.events import Events, LogEntry
from common.messages.packing import pack_floats, pack_ids, unpack_floats, unpack_ids
from common.messages.plan import Plan, Report, RowStart, WorkerCapacity
from common.messages.records import RECORD, unpack_records
from common.messages.request import Generate, StoppingParams
from common.metrics import catalogue
from common.settings.settings import SettingError, Settings
from gpu_worker.agent.agent import Agent
from gpu_worker.agent.publish import Sealed
from gpu_worker.agent.row_text import RowTable
from gpu_worker.process import capacity
from gpu_worker.protocol import SAMPLE, Grant, Ready, StepResult
from tests.support.waiting import wait_until

KEYS = Keys("default")
CHANNEL = KEYS.events("g")
PROMPT = [504, 905]
TOKENIZER = Tokenizer.from_file(str(model_files.resolve("smollm2") / "tokenizer.json"))


class Engine:
    """Remembers what it was granted."""

    def __init__(self) -> None:
        self.grants: list[Grant] = []
        self.token_ms = 0.5

    def send(self, grant: Grant) -> None:
        self.grants.append(grant)


@pytest.fixture
async def agent(redis) -> Agent:
    worker = WorkerCapacity("w0-1", "w0", "m", "float32", 16, 100, 64, 2048)
    agent = Agent(Settings(), redis, Engine(), RowTable(TOKENIZER), worker)
    await agent.open()
    return agent


async def start(agent: Agent, row: int = 1, shown: bytes = b"", **fields) -> None:
    """A plan that starts one admitted request."""
    name = f"r{row}"
    prompt_ids = fields.pop("prompt_ids", pack_ids(PROMPT))
    stopping = StoppingParams(fields.pop("max_new_tokens", 10), stop=fields.pop("stop", []))
    request = Generate(name, "d", prompt_ids, stopping, channel=CHANNEL, **fields)
    await agent.redis.hset(
        KEYS.request(name), mapping={"digest": "d", "worker": "w0-1", "attempt": 1, "base": len(shown) // 8}
    )
    agent.apply(
        plan(agent, starts=[RowStart(row, 1, len(shown) // RECORD.size, shown, pack_ids([1]), request)])
    )


def plan(agent: Agent, **fields) -> Plan:
    return Plan(7, agent.plan + 1, agent.step + 32, 64, **fields)


def step(agent: Agent, tokens: dict[int, tuple[int, int]] | None = None, **fields) -> None:
    """One step that sampled {row: (index, id)}."""
    tokens = tokens or {}
    samples = b"".join(SAMPLE.pack(row, index, token, -0.5) for row, (index, token) in tokens.items())
    agent.take_in(StepResult(agent.step + 1, samples, **fields))


async def reports(redis) -> list[Report]:
    return [
        decode(Report, fields[b"report"])
        for _, fields in await redis.xrange(KEYS.reports("w0-1"))
        if b"report" in fields
    ]


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text).ids


async def test_tokens_ends_and_releases_go_out_together(agent, redis):
    async with redis.pubsub() as pubsub:
        await pubsub.subscribe(CHANNEL)
        await pubsub.get_message(timeout=1)
        await start(agent, max_new_tokens=2)
        first, second = ids_of(" the sea")
        step(agent, {1: (0, first)}, prefilled=[(1, 2)])
        step(agent, {1: (1, second)}, ended=[(1, "length", 2)], released=[(1, 3)])
        await agent.flush()
        said = [
            decode(Events, message["data"])
            for message in [await pubsub.get_message(timeout=1) for _ in range(2)]
        ]
    assert [events.sequence for events in said] == [1, 2]
    (tokens,) = said[0].tokens
    assert (tokens.index, unpack_ids(tokens.ids), tokens.texts) == (0, [first, second], [" the", " sea"])
    [(_, fields)] = await redis.xrange(KEYS.log("w0-1"), min="1")
    [logged] = decode(LogEntry, fields[b"entry"]).tokens
    assert logged == replace(tokens, texts=[])
    assert (said[1].terminals[0].reason, said[1].terminals[0].num_tokens) == ("length", 2)
    result = json.loads(await redis.get(KEYS.result("r1")))
    assert (result["generated_text"], result["ids"], result["logprobs"]) == (
        " the sea",
        [first, second],
        [-0.5, -0.5],
    )
    (report,) = await reports(redis)
    assert (report.prefilled, report.ended, report.released) == ([(1, 2, 1)], [(1, "length", 2)], [(1, 3)])
    assert not agent.table.rows


async def test_the_likeliest_tokens_stand_beside_their_own(agent, redis):
    """In the order of the tokens, however many steps a flush has."""
    async with redis.pubsub() as pubsub:
        await pubsub.subscribe(CHANNEL)
        await pubsub.get_message(timeout=1)
        await start(agent, row=1, top_n_tokens=2)
        await start(agent, row=2)
        for index in range(2):
            top = pack_ids([7 + index, 3]), pack_floats([-0.25, float("-inf")])
            step(agent, {2: (index, 4), 1: (index, 5 + index)}, top_logprobs=[(1, *top)])
        await agent.flush()
        events = decode(Events, (await pubsub.get_message(timeout=1))["data"])
    second, first = events.tokens
    assert (unpack_ids(first.ids), unpack_ids(first.top_ids)) == ([5, 6], [7, 3, 8, 3])
    assert (
        unpack_floats(first.logprobs) == [-0.5, -0.5]
        and unpack_floats(first.top_logprobs) == [-0.25, float("-inf")] * 2
    )
    assert (unpack_ids(second.ids), second.top_ids) == ([4, 4], b"")
    await redis.hset(KEYS.request("r1"), "width", 3)
    committed = (await read(redis, KEYS, ["r1"]))["r1"]
    assert unpack_records(committed.records, 3)[2] == [
        [(7, -0.25), (3, float("-inf"))],
        [(8, -0.25), (3, float("-inf"))],
    ]


async def test_a_step_may_take_twenty_times_what_it_should(agent):
    assert agent.watch.step_timeout_s == agent.settings.step_timeout_s == 60
    await start(agent)
    agent.prefill_tokens = 9999
    assert agent.watch.step_timeout_s == 20 * 10_000 * 0.5 / 1000


async def test_a_stop_string_ends_a_row_at_once_and_nothing_after_it_is_seen(agent, redis):
    await start(agent, stop=["sea"])
    the, sea = ids_of(" the sea")
    step(agent, {1: (0, the)})
    step(agent, {1: (1, sea)})
    assert (
        agent.engine.grants[-1].stops == [(1, "stop_sequence")]
        and agent.engine.grants[-1].prefill_tokens == 64
    )
    step(agent, {1: (2, the)})
    step(agent, ended=[(1, "stop_sequence", 3)], released=[(1, 4)])
    await agent.flush()
    assert json.loads(await redis.get(KEYS.result("r1")))["ids"] == [the, sea]
    (report,) = await reports(redis)
    assert report.ended == [(1, "stop_sequence", 2)]


async def test_a_resumed_row_goes_on_where_it_was(agent, redis):
    the, sea = ids_of(" the sea")
    await start(agent, shown=RECORD.pack(the, -1.0), stop=["the sea"])
    assert unpack_ids(agent.engine.grants[-1].starts[0].ids) == [*PROMPT, the]
    step(agent, {1: (1, sea)})
    await agent.flush()
    result = json.loads(await redis.get(KEYS.result("r1")))
    assert (result["ids"], result["finish_reason"], result["generated_text"]) == (
        [the, sea],
        "stop_sequence",
        " the sea",
    )


def told(first: int, *logprobs: float) -> tuple[int, int, bytes, bytes, bytes]:
    """What a step says of the prompt of row 1: each token, and as the likeliest in its place number 7."""
    return (
        1,
        first,
        pack_floats(logprobs),
        pack_ids([7] * len(logprobs)),
        pack_floats([-0.25] * len(logprobs)),
    )


async def test_what_is_told_of_a_prompt_is_committed_with_the_first_token(agent, redis):
    """Whole, however many chunks it came in."""
    await start(agent, prompt_logprobs=1, prompt_ids=pack_ids([3, 4, 5, 6]))
    assert agent.engine.grants[-1].starts[0].prompt_logprobs == 1
    step(agent, prompt_logprobs=[told(1, -1.0)])
    await agent.flush()
    assert (await read(redis, KEYS, ["r1"]))["r1"].prompt is None
    step(agent, {1: (0, 9)}, prompt_logprobs=[told(2, -2.0, -3.0)], prefilled=[(1, 4)])
    step(agent, {1: (1, 9)})
    await agent.flush()
    state = (await read(redis, KEYS, ["r1"]))["r1"]
    assert state.num_tokens == 2
    assert unpack_records(state.prompt, 2) == ([4, 5, 6], [-1.0, -2.0, -3.0], [[(7, -0.25)]] * 3)


async def test_a_prompt_of_one_token_has_nothing_to_be_told_of(agent, redis):
    await start(agent, prompt_logprobs=0, prompt_ids=pack_ids([3]))
    step(agent, {1: (0, 9)}, prefilled=[(1, 1)])
    await agent.flush()
    assert (await read(redis, KEYS, ["r1"]))["r1"].prompt == b""


async def test_a_prompt_is_told_of_once(agent, redis):
    """By the attempt that has the first token; a row that ends before that leaves nothing."""
    await start(agent, prompt_logprobs=0)
    step(agent, prompt_logprobs=[told(1, -1.0)], ended=[(1, "preempted", 0)], released=[(1, 1)])
    await agent.flush()
    assert (await read(redis, KEYS, ["r1"]))["r1"].prompt is None
    await start(agent, row=2, prompt_logprobs=0, shown=RECORD.pack(5, -1.0))
    assert agent.engine.grants[-1].starts[0].prompt_logprobs is None
    step(agent, {2: (1, 6)}, prefilled=[(2, 3)])
    await agent.flush()
    assert (await read(redis, KEYS, ["r2"]))["r2"].prompt is None


async def test_rows_that_do_not_ask_are_not_told_of_their_prompt(agent, redis):
    await start(agent)
    assert agent.engine.grants[-1].starts[0].prompt_logprobs is None
    step(agent, {1: (0, 9)}, prefilled=[(1, 2)])
    await agent.flush()
    assert await redis.hexists(KEYS.request("r1"), "prompt") == 0


async def test_a_preempted_row_is_spilled_and_has_no_terminal(agent, redis):
    await start(agent)
    step(agent, {1: (0, 5)})
    await agent.flush()
    step(agent, {1: (1, 6)}, ended=[(1, "preempted", 2)], released=[(1, 3)])
    await agent.flush()
    assert unpack_records(await redis.get(KEYS.tokens("r1")))[0] == [5, 6]
    assert await redis.exists(KEYS.result("r1")) == 0


async def test_the_log_is_bounded_and_loses_nothing(agent, redis):
    await start(agent, max_new_tokens=1000)
    for index in range(200):
        step(agent, {1: (index, index)})
        await agent.flush()
    assert await redis.xlen(KEYS.log("w0-1")) <= 65
    committed = (await read(redis, KEYS, ["r1"]))["r1"]
    assert unpack_records(committed.records)[0] == list(range(200))


async def test_a_takeover_drops_all_rows_and_says_so_when_they_are_gone(agent, redis):
    await start(agent)
    agent.apply(Plan(8, 1, 0, 0, takeover=True))
    assert agent.engine.grants[-1].stops == [(1, "takeover")]
    step(agent, ended=[(1, "takeover", 0)])
    await agent.flush()
    step(agent, released=[(1, 2)])
    await agent.flush()
    assert [(report.epoch, report.takeover) for report in await reports(redis)] == [(8, False), (8, True)]
    assert await redis.exists(KEYS.result("r1")) == 0


async def test_rows_that_are_not_here_are_given_back(agent, redis):
    agent.apply(plan(agent, stops=[(9, "client")]))
    await agent.flush()
    (report,) = await reports(redis)
    assert (report.ended, report.released) == ([(9, "preempted", 0)], [(9, 0)])


async def test_it_is_idle_when_nothing_is_held(agent):
    assert agent.idle.is_set()
    agent.apply(plan(agent, blocks=[(5, pack_ids([3]))]))
    assert agent.idle.is_set(), "blocks for a row that has just ended hold nobody up"
    await start(agent)
    assert not agent.idle.is_set()


async def test_a_sealed_agent_publishes_nothing(agent, redis):
    await start(agent)
    seal = [KEYS.log("w0-1"), KEYS.reports("w0-1"), KEYS.worker("w0-1"), KEYS.workers]
    await brokers.script(redis, "seal")(keys=seal, args=["w0-1"])
    step(agent, {1: (0, 5)}, ended=[(1, "length", 1)])
    with pytest.raises(Sealed):
        await agent.flush()
    with pytest.raises(Sealed):
        await agent.announce()
    assert await redis.exists(KEYS.result("r1")) == 0


READY = Ready("m", "float32", "cpu", 16, 100, 64, 2048, pack_ids([2]))


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"max_batch_total_tokens": 15}, "MAX_BATCH_TOTAL_TOKENS: 15 is less than one block of 16 tokens"),
        (
            {"max_total_tokens": 1601},
            "MAX_TOTAL_TOKENS: 1601 is more than the 1600 tokens that context and KV cache allow",
        ),
        (
            {"max_input_tokens": 800, "max_batch_total_tokens": 700},
            "MAX_INPUT_TOKENS: 800 is more than the 688 tokens that",
        ),
    ],
)
def test_limits_that_cannot_be_kept_are_refused(settings, line):
    with pytest.raises(SettingError, match=line):
        capacity(Settings(**settings), READY, "w0", "w0-1", Path("m"))


def test_a_budget_bounds_what_is_announced():
    worker = capacity(Settings(max_batch_total_tokens=700), READY, "w0", "w0-1", Path("m"))
    assert (worker.num_blocks, worker.max_total_tokens) == (43, 688)


async def test_one_spoiled_key_does_not_take_other_terminals_with_it(agent, redis):
    await start(agent, row=1)
    await start(agent, row=2)
    await redis.delete(KEYS.request("r1"))
    await redis.set(KEYS.request("r1"), "x")
    step(agent, {1: (0, 5), 2: (0, 6)}, ended=[(1, "length", 1), (2, "length", 1)])
    await agent.flush()
    assert json.loads(await redis.get(KEYS.result("r2")))["ids"] == [6]


async def test_a_plan_that_cannot_be_read_is_counted_and_the_next_one_applied(agent, redis):
    before = catalogue.UNDECODABLE.values[()]
    await redis.xadd(KEYS.plans("w0-1"), {"plan": b"garbage"}, id="7-1")
    await redis.xadd(KEYS.plans("w0-1"), {"plan": encode(Plan(7, 2, 32, 64))}, id="7-2")
    following = asyncio.create_task(agent.follow_plans())
    await wait_until(lambda: agent.plan == 2)
    following.cancel()
    assert catalogue.UNDECODABLE.values[()] == before + 1
