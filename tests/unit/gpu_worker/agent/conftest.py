"""The agent of these tests."""

import math

import pytest
from redis.asyncio import Redis

from gpu_worker.agent import publish
from gpu_worker.agent.agent import Agent
from tests.support.agents import make_agent


@pytest.fixture
async def agent(redis: Redis, monkeypatch: pytest.MonkeyPatch) -> Agent:
    """One that sends no report because time has passed, unless `flusher.reported_s` is -math.inf."""
    monkeypatch.setattr(publish, "REPORT_INTERVAL_S", math.inf)
    return await make_agent(redis)
