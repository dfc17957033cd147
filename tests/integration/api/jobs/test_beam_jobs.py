"""Beam searches as jobs of other services."""

from deploy.launcher.embedded_broker import Broker
from tests.support.answers.beams import ANSWER, SEQUENCES, TEXTS, scores
from tests.support.fleet.scripted_worker import Answer, working
from tests.support.jobs import CHAT, KEYS, Service, killed_gateway, running_gateway
from tests.support.tokenizer import TOKENIZER
from tests.support.waiting import wait_until

GENERATE = {"inputs": "Hi", "parameters": {"beam_width": 4, "stop": ["zzz"], "details": True}}
BEAMS = {"parameters": {"beam_width": 4, "stop": ["zzz"]}}


async def test_a_job_has_a_frame_for_each_sequence(service: Service, broker: Broker) -> None:
    async with working(broker.url, TOKENIZER, lambda _: ANSWER), running_gateway(broker.url):
        await service.submit(id="a", **GENERATE, reply="stream")
        found = await service.result("a")
        frames = await service.stream("a")
    details = found["details"]
    assert [one["generated_text"] for one in (found, *details["best_of_sequences"])] == [*TEXTS]
    assert details.items() >= scores(0).items()
    assert [frame["generated_text"] for frame in frames] == [*TEXTS]
    assert [frame["details"]["beam_score"] for frame in frames] == [one.score for one in SEQUENCES]


async def test_a_chat_job_has_a_choice_for_each_sequence(service: Service, broker: Broker) -> None:
    async with working(broker.url, TOKENIZER, lambda _: ANSWER), running_gateway(broker.url):
        received = await service.listen("ext:me")
        await service.submit(id="c", **CHAT, **BEAMS, reply_to="ext:me")
        found = await service.result("c")
        await wait_until(lambda: len(received) == 8)
    assert [choice["message"]["content"] for choice in found["choices"]] == [
        TEXTS[0],
        TEXTS[1],
        " four ",
        TEXTS[3],
    ]
    ends = [frame["choices"][0] for frame in received if frame["choices"][0]["finish_reason"]]
    assert all(end.items() >= scores(i).items() for i, end in enumerate(ends)) and len(ends) == 4


async def test_another_gateway_answers_the_job_of_one_that_was_killed(
    service: Service, broker: Broker
) -> None:
    async with working(broker.url, TOKENIZER, lambda _: Answer([], ends=False)) as worker:
        async with killed_gateway(broker.url):
            await service.submit(id="a", **GENERATE, reply="stream")
            await wait_until(lambda: worker.live)
        async with running_gateway(broker.url, "g1"):
            [live] = worker.live.values()
            live.beams = SEQUENCES
            found = await service.result("a")
            assert found["generated_text"] == TEXTS[0]
            assert len(await service.stream("a")) == 4
            await service.settled()
    assert len(worker.seen) == 1


async def test_a_job_that_cannot_be_a_search_is_answered_with_the_reason(
    service: Service, broker: Broker
) -> None:
    async with working(broker.url, TOKENIZER, lambda _: ANSWER), running_gateway(broker.url):
        await service.submit(id="a", inputs="Hi", parameters={"beam_width": 4, "top_p": 0.5})
        assert "`top_p` and a beam search exclude each other" in (await service.result("a"))["error"]
        assert not await service.redis.exists(KEYS.reply("a"))
