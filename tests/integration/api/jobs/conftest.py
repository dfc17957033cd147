"""Fixtures of the tests of jobs."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from deploy.launcher.embedded_broker import Broker
from tests.support.fleet.scripted_worker import FakeWorker, working
from tests.support.jobs import Service, answer
from tests.support.tokenizer import TOKENIZER


@pytest.fixture
async def service(redis: Redis) -> AsyncIterator[Service]:
    service = Service(redis)
    yield service
    for task in service.tasks:
        task.cancel()
        await asyncio.wait([task])


@pytest.fixture
async def worker(broker: Broker) -> AsyncIterator[FakeWorker]:
    async with working(broker.url, TOKENIZER, answer) as fake:
        yield fake
