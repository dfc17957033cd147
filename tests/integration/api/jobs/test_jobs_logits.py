"""Logits in the answers of jobs."""

from redis.asyncio import Redis

from deploy.launcher.embedded_broker import Broker
from tests.support.answers.logits import first_part, positions
from tests.support.answers.openai_frames import CHAT_PATH
from tests.support.fleet.gateways import answering
from tests.support.fleet.scripted_worker import Answer
from tests.support.jobs import CHAT, KEYS, Service, running_gateway
from tests.support.tokenizer import ids
from tests.support.waiting import wait_until

GENERATION = {"return_generation_logits": True}
BOTH = {"return_context_logits": True} | GENERATION


async def test_a_job_has_logits_in_its_answer_only(service: Service, broker: Broker, redis: Redis) -> None:
    async with answering(broker.url, Answer(ids(" x y"))) as (_, _, client):
        for job, path, body in (
            ({"inputs": "a b", "parameters": BOTH}, "/generate", {"inputs": "a b", "parameters": BOTH}),
            ({**CHAT, "parameters": BOTH}, CHAT_PATH, CHAT | BOTH),
        ):
            job_id = await service.submit(**job)
            result = first_part(await service.result(job_id))
            assert result == first_part((await client.post(path, json=body)).json())
            assert positions(result["context_logits"])
            assert 0 < await redis.pttl(KEYS.logits(f"{job_id}#0")) <= 60_000
            refused = await service.result(await service.submit(**job, reply="stream"))
            assert "`return_context_logits` must be false when tokens are streamed" in str(refused)


async def test_a_job_s_gateway_is_not_needed_for_its_logits(service: Service, broker: Broker) -> None:
    """Another one claims the job, and reads them."""
    async with answering(broker.url, Answer(ids(" x y"))) as (worker, _, _):
        await worker.pause()
        job_id = await service.submit(inputs="a b", parameters=GENERATION)
        await wait_until(lambda: service.redis.exists(KEYS.request(f"{job_id}#0")))
    async with running_gateway(broker.url), answering(broker.url, Answer(ids(" x y"))):
        result = await service.result(job_id)
    assert positions(result["generation_logits"]) == [*range(len(ids("a b")) - 1, len(ids("a b")) + 2)]
