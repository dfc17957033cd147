"""The agent of these tests."""

import pytest
from redis.asyncio import Redis

from gpu_worker.agent.agent import Agent
from tests.support.agents import make_agent


@pytest.fixture
async def agent(redis: Redis) -> Agent:
    return await make_agent(redis)
