"""Fixtures of the relay's tests."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from api.streams.relay import Relay
from common.broker.pool_client import PoolClient
from tests.support.events import KEYS


@pytest.fixture
async def relay(redis: Redis) -> AsyncIterator[Relay]:
    """A relay that has subscribed."""
    running = Relay(PoolClient(redis, KEYS), "g0")
    task = asyncio.create_task(running.run())
    await running.subscribed.wait()
    yield running
    task.cancel()
    await asyncio.wait([task])
