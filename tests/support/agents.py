"""An agent with a broker, and with an engine that only records what it is sent."""

import asyncio
from collections.abc import Awaitable
from typing import Any, cast

from redis.asyncio import Redis

from common.broker.pool_client import PoolClient
from common.messages.codec import decode
from common.messages.plan import NewRow, Plan, Report, WorkerCapacity
from common.messages.records import RECORD, pack_floats, pack_ids
from common.messages.request import Generate, StoppingParams
from common.settings.settings import Settings
from gpu_worker.agent.agent import Agent
from gpu_worker.agent.engine_client import EngineClient, StepsHandler
from gpu_worker.agent.state import AgentState
from gpu_worker.protocol import SAMPLE, StepResult
from tests.support.broker_state import KEYS
from tests.support.tokenizer import TOKENIZER

CHANNEL = KEYS.events("g")
PROMPT = [504, 905]


class RecordingEngine(EngineClient):
    """An engine that only records the plans that it is sent."""

    def __init__(self) -> None:
        super().__init__([])
        self.grants: list[Plan] = []

    def send(self, plan: Plan) -> None:
        self.grants.append(plan)

    async def run_steps(self, handle: StepsHandler) -> None:
        await asyncio.Future()


async def hset(redis: Redis, key: str, fields: dict[str, Any]) -> None:
    await cast(Awaitable[int], redis.hset(key, mapping=fields))


async def make_agent(redis: Redis) -> Agent:
    worker = WorkerCapacity("w0-1", "w0", "m", "float32", 16, 100, 64, 2048, token_ms=0.5)
    agent = Agent(Settings(), PoolClient(redis, KEYS), RecordingEngine(), AgentState(TOKENIZER), worker)
    await agent.create_streams()
    return agent


def grants(agent: Agent) -> list[Plan]:
    assert isinstance(agent.engine, RecordingEngine)
    return agent.engine.grants


async def start(
    agent: Agent, row: int = 1, committed: bytes = b"", num_cached: int = 0, **fields: Any
) -> None:
    """Make a plan that starts one admitted request."""
    name = f"r{row}"
    prompt_ids = fields.pop("prompt_ids", pack_ids(PROMPT))
    stopping = StoppingParams(fields.pop("max_new_tokens", 10), stop=fields.pop("stop", []))
    request = Generate(name, "d", prompt_ids, stopping, channel=CHANNEL, **fields)
    base = len(committed) // RECORD.size
    admitted = {"digest": "d", "worker": "w0-1", "attempt": 1, "base": base}
    await hset(agent.pool.redis, KEYS.request(name), admitted)
    start = NewRow(row, 1, base, committed, pack_ids([1]), request, num_cached)
    agent.plans.apply(await agent.plans.with_pictures(plan(agent, starts=[start])))


def plan(agent: Agent, **fields: Any) -> Plan:
    return Plan(7, agent.state.plan.number + 1, agent.state.step + 32, 64, **fields)


def step(agent: Agent, tokens: dict[int, tuple[int, int]] | None = None, **fields: Any) -> None:
    """Make a step that sampled {row: (index, id)}."""
    samples = b"".join(SAMPLE.pack(row, index, token, -0.5) for row, (index, token) in (tokens or {}).items())
    agent.steps.apply(StepResult(agent.state.step + 1, samples, **fields))


async def reports(redis: Redis) -> list[Report]:
    return [
        decode(Report, fields[b"report"])
        for _, fields in await redis.xrange(KEYS.reports("w0-1"))
        if b"report" in fields
    ]


def prompt_logprobs(first: int, *logprobs: float) -> tuple[int, int, bytes, bytes, bytes]:
    """Make prompt log-probabilities of row 1 in a step; the likeliest token is always 7."""
    count = len(logprobs)
    return 1, first, pack_floats(logprobs), pack_ids([7] * count), pack_floats([-0.25] * count)
