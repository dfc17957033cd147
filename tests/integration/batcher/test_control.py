"""The stream `control`: a batcher that was stopped obeys every cancel, and keeps the stream short."""

import os
import signal

from redis.asyncio import Redis

from common.broker.keys import Keys
from common.broker.pool_client import PoolClient
from common.broker.request_scripts import cancel_request
from common.messages.codec import encode
from common.messages.request import Cancel
from deploy.launcher.embedded_broker import Broker
from tests.support.fleet.batchers import admit, batcher, ended, waiting
from tests.support.waiting import wait_until

KEYS = Keys("default")
MANY = 11_000
SHORT = 500


async def cancel_many(redis: Redis) -> None:
    """Cancel as the script does for requests that are not known any more, in one message."""
    async with redis.pipeline(transaction=False) as pipe:
        for i in range(MANY):
            pipe.xadd(KEYS.control, {"cancel": encode(Cancel(f"gone{i}", "client"))})
        await pipe.execute()


async def test_a_stopped_batcher_obeys_a_cancel_that_thousands_followed(broker: Broker, redis: Redis) -> None:
    await redis.set(KEYS.gateway("g"), 1)
    with batcher(broker.url) as process:
        await admit(redis, "first")
        await wait_until(lambda: waiting(redis, 1))
        os.kill(process.pid, signal.SIGSTOP)
        await cancel_request(PoolClient(redis, KEYS), "first")
        await cancel_many(redis)
        await cancel_request(PoolClient(redis, KEYS), "gone")
        os.kill(process.pid, signal.SIGCONT)
        assert (await ended(redis, "first")).error_type == "cancelled"
        await wait_until(lambda: is_short(redis))


async def is_short(redis: Redis) -> bool:
    return int(await redis.xlen(KEYS.control)) < SHORT
