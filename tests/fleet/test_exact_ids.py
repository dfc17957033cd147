"""Through HTTP, Redis and back: the ids are those of transformers' `generate`. And two pools on one broker
keep apart.
"""

import asyncio

import pytest

from benchmarks.client import stream
from common.broker.client import connect
from common.broker.keys import Keys
from tests.support import brokers
from tests.support.engine.reference import prompt_ids, reference_ids
from tests.support.fleet.fleet import Fleet
from tests.support.prompts import FEW, PROMPTS

MAX_NEW_TOKENS = 40
SETTINGS = {"dtype": "float32", "debug_kv": True, "kv_cache_bytes": "128MiB"}


@pytest.mark.parametrize(
    "prompts",
    [
        pytest.param([PROMPTS[place] for place in FEW], id="few"),
        pytest.param(PROMPTS, id="all", marks=pytest.mark.slow),
    ],
)
async def test_ids_equal_generate(prompts: list[str]) -> None:
    wanted = reference_ids(prompt_ids(prompts), MAX_NEW_TOKENS)
    with Fleet(**SETTINGS, max_batch_prefill_tokens=64) as fleet:
        url = f"{fleet.base_url}/generate_stream"
        bodies = [
            {"inputs": prompt, "parameters": {"max_new_tokens": MAX_NEW_TOKENS, "details": True}}
            for prompt in prompts
        ]
        alone = [(await stream(url, body)).ids for body in bodies[:3]]
        together = await asyncio.gather(*(stream(url, body) for body in bodies))
    assert alone == wanted[:3]
    assert [answer.ids for answer in together] == wanted
    ended = [answer.frames[-1]["details"]["finish_reason"] for answer in together]
    assert ended == ["length" if len(ids) == MAX_NEW_TOKENS else "eos_token" for ids in wanted]


async def test_two_pools_on_one_broker_keep_apart() -> None:
    body = {"inputs": "The sky is", "parameters": {"max_new_tokens": 5}}
    with brokers.running() as broker:
        pools = [Fleet(**SETTINGS, redis_url=broker.url, pool=pool) for pool in ("red", "blue")]
        try:
            for fleet in pools:
                fleet.start()
            for fleet in pools:
                fleet.ready()
            redis = connect(broker.url)
            ids = [(await stream(f"{fleet.base_url}/generate_stream", body)).ids for fleet in pools]
            assert ids[0] == ids[1] and len(ids[0]) == 5
            for pool in ("red", "blue"):
                assert len(await redis.zrange(Keys(pool).workers, 0, -1)) == 1
            pools[1].kill()
            assert len((await stream(f"{pools[0].base_url}/generate_stream", body)).ids) == 5
            await redis.aclose()
        finally:
            for fleet in pools:
                fleet.kill()
