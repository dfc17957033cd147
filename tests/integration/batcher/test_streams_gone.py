"""A worker whose streams are gone goes on as its next incarnation, over the same engine."""

import contextlib

from redis.asyncio import Redis

from common.messages.codec import encode
from common.messages.plan import WorkerDied
from deploy.launcher.embedded_broker import Broker
from gpu_worker.agent.publish import Sealed
from tests.support.broker_state import KEYS, queue, result_ids
from tests.support.fleet.batchers import batcher
from tests.support.fleet.modeless_worker import generate, modeless_worker
from tests.support.waiting import wait_until

NUM_TOKENS = 100
PROMPT = [504, 905]


async def test_rows_are_released_before_the_next_incarnation_serves(broker: Broker, redis: Redis) -> None:
    """Row numbers and steps go on: the engine knows nothing of incarnations. The death of the process is the
    end of the last one, which finds its log sealed or gone.
    """
    ended = False
    with contextlib.suppress(Sealed):
        async with modeless_worker(broker.url, "w0") as engine:
            with batcher(broker.url, "b0"):
                await queue(redis, "lost", PROMPT, NUM_TOKENS, channel=KEYS.events("g"))
                await wait_until(lambda: engine.rows.step > 5)
                await redis.flushall()
                await wait_until(lambda: redis.exists(KEYS.worker("w0-1.2")))
                assert not engine.rows.rows
                await queue(redis, "next", PROMPT, NUM_TOKENS, channel=KEYS.events("g"))
                assert await result_ids(redis, "next") == generate(PROMPT, NUM_TOKENS)
                assert list(engine.ids) == [1, 2]
                await redis.xadd(KEYS.control, {"died": encode(WorkerDied("w0-1"))})
                await wait_until(lambda: is_removed(redis, "w0-1.2"))
                ended = True
    assert ended


async def is_removed(redis: Redis, incarnation: str) -> bool:
    return not await redis.exists(KEYS.log(incarnation), KEYS.reports(incarnation), KEYS.plans(incarnation))
