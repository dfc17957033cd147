from collections.abc import Iterator

import pytest
import redis

from deploy.broker import Broker
from tests import brokers


@pytest.fixture(scope="session")
def shared_broker() -> Iterator[Broker]:
    with brokers.running() as broker:
        yield broker


@pytest.fixture
def broker(shared_broker: Broker) -> Broker:
    """A running broker (`broker.url`) without any key; the same server for all tests."""
    with redis.Redis.from_url(shared_broker.url) as client:
        client.flushall()
        client.script_flush()
    return shared_broker
