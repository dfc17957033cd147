"""A worker whose streams are gone goes on as its next incarnation, over the same engine."""

from redis.asyncio import Redis

from common.messages.codec import encode
from common.messages.packing import pack_ids
from common.messages.plan import WorkerDied
from common.messages.request import Generate, StoppingParams
from deploy.serve.embedded_broker import Broker
from tests.support.broker_state import KEYS, admit, result_ids
from tests.support.fleet.batchers import batcher
from tests.support.fleet.modeless_worker import generate, modeless_worker
from tests.support.waiting import wait_until

NUM_TOKENS = 100
PROMPT = [504, 905]


async def send(redis: Redis, name: str) -> None:
    stopping = StoppingParams(NUM_TOKENS, ignore_eos=True)
    await admit(redis, Generate(name, "d", pack_ids(PROMPT), stopping, channel=KEYS.events("g")))


async def test_rows_are_released_before_the_next_incarnation_serves(broker: Broker, redis: Redis) -> None:
    """Row numbers and steps go on: the engine knows nothing of incarnations. The death of the process is the
    end of the last one.
    """
    async with modeless_worker(broker.url, "w0") as engine:
        with batcher(broker.url, "b0"):
            await send(redis, "lost")
            await wait_until(lambda: engine.rows.step > 5)
            await redis.flushall()
            await wait_until(lambda: redis.exists(KEYS.worker("w0-1.2")))
            assert not engine.rows.rows
            await send(redis, "next")
            assert await result_ids(redis, "next") == generate(PROMPT, NUM_TOKENS)
            assert list(engine.ids) == [1, 2]
            await redis.xadd(KEYS.control, {"died": encode(WorkerDied("w0-1"))})
            await wait_until(lambda: redis.exists(KEYS.worker("w0-1.3")))
