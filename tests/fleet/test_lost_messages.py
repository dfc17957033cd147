"""A gateway that loses messages reads the missing tokens from the broker: its clients get every token."""

from typing import Any

import pytest

from common.broker.client import connect
from common.broker.keys import Keys
from common.messages.codec import decode
from common.messages.events import Events
from common.messages.records import unpack_floats, unpack_ids
from tests.support.fleet.fleet import Fleet
from tests.support.fleet.leftovers import idle
from tests.support.load import Load
from tests.support.waiting import wait_until

KEYS = Keys("default")
SETTINGS = {
    "num_workers": 2,
    "num_gateways": 2,
    "dtype": "float32",
    "debug_kv": True,
    "kv_cache_bytes": "64MiB",
}


@pytest.mark.slow
async def test_lost_messages_cost_no_frame() -> None:
    """The gateways lose a tenth of all messages. The test itself loses none, and compares."""
    with Fleet(**SETTINGS, tokenfleet_test_lose="0.1:7") as fleet:
        redis = connect(fleet.redis_url)
        async with redis.pubsub() as pubsub:
            await pubsub.psubscribe(KEYS.events("*"))
            load = Load(fleet, 60)
            await load.whole()
            published = await published_tokens(pubsub)
        await wait_until(lambda: idle(redis, set()))
        await redis.aclose()
    shown = [[list(frame["token"].values())[:3] for frame in one.frames] for one in load.streams]
    assert sorted(shown) == sorted(published.values())


async def published_tokens(pubsub: Any) -> dict[str, list[Any]]:
    """Return [id, text, log-probability] of every published token, by request."""
    published: dict[str, list[Any]] = {}
    while (message := await pubsub.get_message(timeout=0.2)) is not None:
        for tokens in decode(Events, message["data"]).all_tokens if message["type"] == "pmessage" else ():
            triples = zip(unpack_ids(tokens.ids), tokens.texts, unpack_floats(tokens.logprobs), strict=True)
            published.setdefault(tokens.request_id, []).extend(map(list, triples))
    return published
