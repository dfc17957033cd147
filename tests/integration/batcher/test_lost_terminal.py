"""A broker that has lost a request's end: the request goes on from what was committed, and ends once more."""

import contextlib

from redis.asyncio import Redis

from common.broker import committed
from common.broker.client import ERRORS, connect
from common.broker.pool_client import PoolClient
from tests.support.broker.rollback import restorable
from tests.support.broker_state import KEYS, queue, result_ids
from tests.support.fleet.batchers import batcher
from tests.support.fleet.modeless_worker import generate, modeless_worker
from tests.support.waiting import wait_until

NUM_TOKENS = 60
PROMPT = [504, 905]


async def has_ended(redis: Redis) -> bool:
    """Whether the request has its end, and the batcher has removed it; False while the broker is away."""
    with contextlib.suppress(*ERRORS):
        has_terminal = await redis.hexists(KEYS.request("r"), "terminal")  # type: ignore[misc]
        return bool(has_terminal) and not await redis.xlen(KEYS.requests)
    return False


async def test_only_what_was_lost_is_computed_again_and_it_ends_once() -> None:
    with restorable() as restorable_broker:
        url = restorable_broker.broker.url
        async with connect(url) as redis, modeless_worker(url, "w0") as engine:
            with batcher(url, "b0"):
                await queue(redis, "r", PROMPT, NUM_TOKENS, channel=KEYS.events("g"))
                await wait_until(lambda: engine.rows.step > NUM_TOKENS // 2)
                engine.step_s = 0.2  # the end must not be in the copy
                num_kept = (await committed.read(PoolClient(redis, KEYS), ["r"]))["r"].num_tokens
                restorable_broker.keep()
                engine.step_s = 0.02
                await wait_until(lambda: has_ended(redis))
                restorable_broker.restore()
                await wait_until(lambda: engine.num_starts == 2)
                await wait_until(lambda: has_ended(redis))
                assert await result_ids(redis, "r") == generate(PROMPT, NUM_TOKENS)
                base = await redis.hget(KEYS.request("r"), "base")  # type: ignore[misc]
                assert int(base or 0) >= num_kept > 0
                await wait_until(lambda: not engine.rows.rows)
                assert engine.num_starts == 2
