"""Look-up: finds the pool that an admitted request is in, by the request's id. No other part of the fleet
knows it: a gateway asks the brokers of all pools.
"""

import asyncio
import contextlib
import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple

from redis.asyncio import Redis

from api.answers.answer import HttpAnswer, read_answer
from api.errors import ApiError, asking_broker
from api.requests.pool import PoolRegistry, pool_url
from common.broker.client import broker_url, connect
from common.broker.keys import Keys
from common.messages.codec import WireError
from common.settings.settings import SettingError

log = logging.getLogger(__name__)


class FoundAnswer(NamedTuple):
    """An answer, the name of its pool, and the channel of its events."""

    pool: str
    answer: HttpAnswer
    channel: str


async def look_up(pools: PoolRegistry, request_id: str) -> FoundAnswer | None:
    """Ask all brokers at once. The first that knows the request ends the search, so one that is down is
    waited for only if no other does. Raises ApiError (503) if none knows it, and one cannot say so.
    """
    tasks = [
        asyncio.create_task(ask_broker(pools, url, names, request_id))
        for url, names in pools_by_broker(pools).items()
    ]
    failures = []
    try:
        for next_done in asyncio.as_completed(tasks):
            try:
                if (found := await next_done) is not None:
                    return found
            except ApiError as error:
                failures.append(error)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    if failures:
        raise failures[0]
    return None


def pools_by_broker(pools: PoolRegistry) -> dict[str, list[str]]:
    """URL of a broker → its pools; the own pool is the first."""
    own = pools.own.settings
    by_url = defaultdict(list, {broker_url(own): [own.pool]})
    for name, known in pools.directory.pools.items():
        if name != own.pool:
            try:
                by_url[pool_url(own, name, known.entry.address)].append(name)
            except SettingError as error:
                log.debug("requests of pool %s are not looked for: %s", name, error)
    return by_url


async def ask_broker(
    pools: PoolRegistry, url: str, names: Sequence[str], request_id: str
) -> FoundAnswer | None:
    """Look the request up in the pools of one broker. Raises ApiError (503)."""
    firsts = [(name, choice) for name in names for choice in (request_id, f"{request_id}.0")]
    async with asking_broker(), client_at(pools, url, names) as redis:
        pipe = redis.pipeline(transaction=False)
        for name, choice in firsts:
            pipe.hmget(Keys(name).request(choice), ["answer", "channel"])
        replies = await pipe.execute(raise_on_error=False)
    for (name, _), reply in zip(firsts, replies, strict=True):
        if isinstance(reply, list) and None not in reply:
            with contextlib.suppress(WireError):  # another program wrote to the key
                return FoundAnswer(name, read_answer(reply[0]), reply[1].decode())
    return None


@contextlib.asynccontextmanager
async def client_at(pools: PoolRegistry, url: str, names: Sequence[str]) -> AsyncIterator[Redis]:
    """The connection of a pool that is open on this broker, or else one for this moment."""
    for pool in pools.all():
        if pool.settings.pool in names and pool.settings.redis_url == url:
            yield pool.client.redis
            return
    async with connect(url) as redis:
        yield redis
