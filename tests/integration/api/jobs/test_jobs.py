"""Jobs of other services: what a plain client of Redis gets."""

from api.lifecycle import Gateway
from common.settings.settings import Settings
from deploy.launcher.embedded_broker import Broker
from tests.support.fleet.gateways import SETTINGS
from tests.support.fleet.scripted_worker import Answer, FakeWorker, working
from tests.support.jobs import CHAT, IDS, KEYS, TEXT, Service, answer, running_gateway
from tests.support.tokenizer import TOKENIZER, model_tokenizer
from tests.support.waiting import wait_until


async def test_a_job_gets_the_answer_of_http(service: Service, worker: FakeWorker, broker: Broker) -> None:
    received = await service.listen("ext:me")
    async with running_gateway(broker.url):
        job_id = await service.submit(
            inputs="Count.", parameters={"details": True}, reply_to="ext:me", reply="stream"
        )
        result = await service.result(job_id)
        await wait_until(lambda: len(received) == len(IDS) + 1)
        await service.settled()
    assert result["generated_text"] == TEXT
    assert result["details"]["finish_reason"] == "eos_token"
    assert [frame["token"]["id"] for frame in received] == [*IDS, 2]
    assert [frame["generated_text"] for frame in received] == [None] * len(IDS) + [TEXT]
    assert await service.stream(job_id) == received
    assert await service.stream(job_id, after="4-0") == received[4:]
    hour = [
        await service.redis.ttl(key) for key in (KEYS.result(job_id), KEYS.reply(job_id), KEYS.job(job_id))
    ]
    assert all(3500 < ttl <= 3600 for ttl in hour)


async def test_a_chat_job_gets_the_answer_of_http(
    service: Service, worker: FakeWorker, broker: Broker
) -> None:
    received = await service.listen("ext:me")
    async with running_gateway(broker.url):
        await service.submit(
            id="c",
            **CHAT,
            parameters={"n": 2, "stream_options": {"include_usage": True}},
            reply_to="ext:me",
            reply="stream",
        )
        result = await service.result("c")
        await wait_until(lambda: received and received[-1].get("usage"))
    assert result["object"] == "chat.completion"
    assert [choice["message"]["content"] for choice in result["choices"]] == [TEXT, TEXT]
    for i in range(2):
        deltas = [
            choice["delta"].get("content") or ""
            for chunk in received
            for choice in chunk["choices"]
            if choice["index"] == i
        ]
        assert "".join(deltas) == TEXT
    assert {chunk["object"] for chunk in received} == {"chat.completion.chunk"}
    assert await service.stream("c") == received


async def test_a_chat_job_is_the_same_with_and_without_a_receiver_of_its_chunks(
    service: Service, worker: FakeWorker, broker: Broker
) -> None:
    job = {"id": "c", **CHAT, "parameters": {"stream_options": {"include_usage": True}}}
    async with running_gateway(broker.url):
        await service.submit(**job)
        whole = await service.result("c")
        received = await service.listen("ext:me")
        await service.submit(**job, reply_to="ext:me")
        await wait_until(lambda: received and received[-1].get("usage"))
    assert whole["choices"][0]["message"]["content"] == TEXT
    assert received[-1]["usage"] == whole["usage"]
    assert len(worker.seen) == 1


async def test_a_job_has_prompt_logprobs_in_its_answer_only(
    service: Service, worker: FakeWorker, broker: Broker
) -> None:
    job = {"inputs": "Count to ten.", "parameters": {"decoder_input_details": True}}
    async with running_gateway(broker.url):
        result = await service.result(await service.submit(**job))
        refused = await service.result(await service.submit(**job, reply="stream"))
    ids = TOKENIZER.encode("Count to ten.").ids
    assert [(token["id"], token["logprob"]) for token in result["details"]["prefill"]] == [(ids[0], None)] + [
        (token_id, -0.5 * i) for i, token_id in enumerate(ids) if i
    ]
    assert (refused["error_type"], "`decoder_input_details`" in refused["error"]) == ("validation", True)


async def test_an_invalid_job_is_answered_with_its_error(service: Service, broker: Broker) -> None:
    received = await service.listen("ext:me")
    async with (
        working(broker.url, TOKENIZER, lambda _: Answer(IDS[:3], error="the engine broke")),
        running_gateway(broker.url),
    ):
        await service.submit(id="a", inputs="Count.", reply_to="ext:me")
        result = await service.result("a")
        await wait_until(lambda: len(received) == 4)
    assert (
        result
        == received[-1]
        == {"error": "Request failed during generation: the engine broke", "error_type": "generation"}
    )


async def test_a_job_waits_for_room_in_the_queue(
    service: Service, worker: FakeWorker, broker: Broker
) -> None:
    async with running_gateway(broker.url, max_concurrent_requests=2):
        for i in range(8):
            await service.submit(id=f"j{i}", inputs="Count.", parameters={"best_of": 1})
        assert [await service.result(f"j{i}") for i in range(8)] == [{"generated_text": TEXT}] * 8


async def test_a_job_waits_for_a_worker(service: Service, broker: Broker) -> None:
    gateway = Gateway(Settings(redis_url=broker.url, **SETTINGS), "g0", model_tokenizer())
    async with gateway.running():
        await service.submit(id="a", inputs="Count.")
        await wait_until(lambda: gateway.job_consumer.runs)
        async with working(broker.url, TOKENIZER, answer):
            assert await service.result("a") == {"generated_text": TEXT}


async def test_jobs_beyond_submit_limit_are_rejected(
    service: Service, worker: FakeWorker, broker: Broker
) -> None:
    await worker.pause()
    async with running_gateway(broker.url, submit_limit=3):
        for i in range(5):
            await service.submit(id=f"j{i}", inputs="Count.")
        errors = [await service.result(f"j{i}") for i in (3, 4)]
        assert errors == [{"error": "Model is overloaded", "error_type": "overloaded"}] * 2
        worker.going.set()
        assert [await service.result(f"j{i}") for i in range(3)] == [{"generated_text": TEXT}] * 3
        await service.settled()
    assert len(worker.seen) == 3


async def test_a_job_is_cancelled_before_or_while_it_runs(service: Service, broker: Broker) -> None:
    received = await service.listen("ext:me")
    async with (
        working(broker.url, TOKENIZER, lambda _: Answer(IDS * 500, ends=False), step_s=0.01) as worker,
        running_gateway(broker.url) as gateway,
    ):
        await service.submit(id="runs", inputs="Count.", reply_to="ext:me")
        await wait_until(lambda: len(received) > 3)
        await service.redis.xadd(KEYS.submit, {"cancel": "runs"})
        result = await service.result("runs")
        await wait_until(lambda: received[-1] == result)
        assert "cancelled" in result["error"]
        await service.redis.xadd(KEYS.submit, {"cancel": "early"})
        await service.submit(id="early", inputs="Count.")
        assert (await service.result("early"))["error_type"] == "cancelled"
        for name in (b"nobody", b"\xff", b""):
            await service.redis.xadd(KEYS.submit, {"cancel": name})
        await service.settled()
        await wait_until(lambda: not gateway.pool.relay.streams and not worker.live)
        assert len(worker.seen) <= 2


async def test_calls_of_tools_are_in_results_and_chunks(service: Service, broker: Broker) -> None:
    call = '{"name": "f", "parameters": {"x": 1}}'
    tools = [{"type": "function", "function": {"name": "f"}}]
    received = await service.listen("ext:me")
    scripted = Answer(TOKENIZER.encode(call).ids)
    async with working(broker.url, TOKENIZER, lambda _: scripted), running_gateway(broker.url):
        job_id = await service.submit(**CHAT, parameters={"tools": tools}, reply_to="ext:me")
        [choice] = (await service.result(job_id))["choices"]
        await wait_until(lambda: received and received[-1]["choices"][0]["finish_reason"])
    [called] = choice["message"]["tool_calls"]
    assert called["function"] == {"name": "f", "arguments": '{"x": 1}'}
    pieces = [one for chunk in received for one in chunk["choices"][0]["delta"].get("tool_calls", [])]
    assert pieces[0]["id"] == called["id"]
    assert "".join(one["function"]["arguments"] for one in pieces) == '{"x": 1}'


async def test_a_job_is_of_the_class_batch_unless_it_says_otherwise(
    service: Service, worker: FakeWorker, broker: Broker
) -> None:
    async with running_gateway(broker.url):
        for i, terms in enumerate(({}, {"priority": "interactive", "tenant": "acme", "deadline_ms": 60_000})):
            await service.submit(id=f"j{i}", inputs="Count.", **terms)
            await service.result(f"j{i}")
        chat = {"messages": [{"role": "user", "content": "Hi"}]}
        await service.submit(id="chat", **chat, parameters={"service_tier": "default"})
        await service.result("chat")
        await service.submit(id="wrong", inputs="Count.", priority="urgent")
        assert "`priority` must be one of" in (await service.result("wrong"))["error"]
    assert [(one.class_name, one.tenant) for one in worker.seen] == [
        ("batch", ""),
        ("interactive", "acme"),
        ("standard", ""),
    ]
    assert 50_000 < worker.seen[1].ttl_ms <= 60_000


async def test_a_job_that_waits_beyond_its_deadline_never_starts(
    service: Service, worker: FakeWorker, broker: Broker
) -> None:
    async with running_gateway(broker.url, max_concurrent_requests=1):
        await worker.pause()
        await service.submit(id="first", inputs="Count.")
        await wait_until(lambda: worker.redis.xlen(worker.keys.requests))
        await service.submit(id="late", inputs="Count.", deadline_ms=300)
        error = await service.result("late")
        assert error["error_type"] == "timeout" and "it never started" in error["error"]
        worker.going.set()
        assert await service.result("first") == {"generated_text": TEXT}
    assert len(worker.seen) == 1
