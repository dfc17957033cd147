"""TGI's answers, through real HTTP and a real broker, from a worker whose tokens are scripted."""

import asyncio
import json
from typing import Any

import pytest

from api.streams.stream import Stream
from common.messages.events import Terminal, Tokens
from common.messages.records import pack_floats, pack_ids, unpack_floats
from common.messages.request import Generate, StoppingParams
from deploy.launcher.embedded_broker import Broker
from tests.support.answers.tgi_bodies import bodies_of
from tests.support.fleet.gateways import answering, stream
from tests.support.fleet.scripted_worker import Answer
from tests.support.sse import data_of
from tests.support.tokenizer import IM_END, TOKENIZER, ids, model_tokenizer


def frames(content: bytes) -> list[dict[str, Any]]:
    return [json.loads(data) for data in data_of(content)]


async def test_a_stream_has_exactly_tgis_bytes(broker: Broker) -> None:
    answer = Answer(ids(" é🙂"))
    expected_ids = [*answer.ids, IM_END]
    async with answering(broker.url, answer) as (worker, _, client):
        content = await stream(client, {"inputs": "Hi", "parameters": {"max_new_tokens": 9, "details": True}})
    assert worker.seen[0].stopping.max_new_tokens == 9
    whole = [
        {"id": token_id, "text": text, "logprob": logprob, "special": token_id == IM_END}
        for token_id, text, logprob in zip(
            expected_ids, pieces(expected_ids), logprobs(len(expected_ids)), strict=True
        )
    ]
    details = {
        "finish_reason": "eos_token",
        "generated_tokens": len(expected_ids),
        "seed": None,
        "input_length": len(ids("Hi")),
    }
    bodies = [
        {"index": i + 1, "token": token, "generated_text": None, "details": None}
        for i, token in enumerate(whole)
    ]
    bodies[-1] |= {"generated_text": " é🙂", "details": details}  # type: ignore[dict-item]
    expected = "".join(
        f"data: {json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n" for body in bodies
    )
    assert content == expected.encode()


def logprobs(count: int) -> list[float]:
    """As the fake worker has them, in float32."""
    return unpack_floats(pack_floats([-0.1 - i / 7 for i in range(count)]))


def pieces(token_ids: list[int]) -> list[str]:
    """The texts, by hand: every character appears whole, with its last byte."""
    shown, found = "", []
    for i in range(1, len(token_ids) + 1):
        text = TOKENIZER.decode(token_ids[:i], skip_special_tokens=False)
        found.append("" if text.endswith("\ufffd") else text[len(shown) :])
        shown = shown + found[-1]
    return found


async def test_a_stream_has_tgis_headers(broker: Broker) -> None:
    async with (
        answering(broker.url, Answer(ids("a b")), compute_type="cpu") as (_, _, client),
        client.stream("POST", "/generate_stream", json={"inputs": "Hé"}) as response,
    ):
        assert response.headers["content-type"] == "text/event-stream"
        assert response.headers["cache-control"] == "no-cache"
        assert response.headers["x-accel-buffering"] == "no"
        assert response.headers["x-compute-type"] == "cpu"
        assert response.headers["x-compute-characters"] == "2"
        last = frames(await response.aread())[-1]
    assert last["details"] is None
    assert last["generated_text"] == "a b"


async def test_a_frame_is_sent_as_soon_as_its_token_comes(broker: Broker) -> None:
    """A frame does not wait for the token after it, unless it may be the last."""
    answer = Answer(ids("one two three four"), ends=False)
    async with (
        answering(broker.url, answer) as (_, _, client),
        client.stream(
            "POST", "/generate_stream", json={"inputs": "count", "parameters": {"max_new_tokens": 9}}
        ) as response,
    ):
        seen = b""
        async for chunk in response.aiter_raw():
            seen += chunk
            if len(frames(seen)) == len(answer.ids):
                break
    assert [frame["index"] for frame in frames(seen)] == [1, 2, 3, 4]


async def test_generate_returns_the_whole_answer(broker: Broker) -> None:
    answers = Answer(ids("one two three"))
    async with answering(broker.url, answers) as (_, _, client):
        body = {"inputs": "Hi", "parameters": {"details": True, "stop": ["x", "tw"]}}
        response = await client.post("/generate", json=body)
        short = await client.post("/generate", json=body | {"parameters": {"stop": ["x", "tw"]}})
    assert short.json() == {"generated_text": "one tw"}
    answer = response.json()
    assert list(answer) == ["generated_text", "details"]
    assert list(answer["details"]) == ["finish_reason", "generated_tokens", "seed", "prefill", "tokens"]
    assert answer["details"]["finish_reason"] == "stop_sequence"
    assert [token["text"] for token in answer["details"]["tokens"]] == ["one", " two"]
    assert answer["details"]["prefill"] == []
    times = [
        response.headers[f"x-{name}"]
        for name in ("total-time", "validation-time", "queue-time", "inference-time", "time-per-token")
    ]
    assert all(time.isdecimal() for time in times)
    assert abs(int(times[0]) - sum(map(int, times[1:4]))) <= 3
    assert 0 < float(response.headers["x-compute-time"]) < 20
    assert response.headers["x-prompt-tokens"] == str(len(ids("Hi")))
    assert response.headers["x-generated-tokens"] == "2"
    assert response.headers["x-compute-characters"] == "2"
    assert "x-compute-type" not in response.headers


async def test_parameters_become_fields_of_the_queued_request(broker: Broker) -> None:
    parameters = {
        "truncate": 2,
        "stop": ["x", "yy"],
        "ignore_eos": True,
        "temperature": 1.0,
        "do_sample": False,
        "unknown": [1],
    }
    async with answering(broker.url, Answer(ids("x"))) as (worker, gateway, client):
        await stream(client, {"inputs": "one two three four", "parameters": parameters, "model": "any"})
        await stream(client, {"inputs": "one two three four", "parameters": None})
    first, second = worker.seen
    assert first.prompt_ids == b"".join(i.to_bytes(4, "little") for i in ids("one two three four")[-2:])
    assert first.stopping == StoppingParams(1024 - 2, stop=["x", "yy"], ignore_eos=True)
    assert second.stopping == StoppingParams(1024 - 4)
    assert (
        first.channel == gateway.pool.relay.channel
        and first.gateway == "g0-test"
        and first.request_id != second.request_id
    )


async def test_end_of_sequence_tokens_are_shown_at_once_when_ignored(broker: Broker) -> None:
    answer = Answer([IM_END, IM_END], ends=False)
    async with (
        answering(broker.url, answer) as (_, _, client),
        client.stream(
            "POST", "/generate_stream", json={"inputs": "a", "parameters": {"ignore_eos": True}}
        ) as response,
    ):
        seen = b""
        async for chunk in response.aiter_raw():
            seen += chunk
            if len(frames(seen)) == 2:
                break


@pytest.mark.parametrize("shown", [0, 2])
async def test_a_failed_stream_ends_with_the_error(broker: Broker, shown: int) -> None:
    answer = Answer(ids("a b")[:shown], error="two workers died")
    async with answering(broker.url, answer) as (_, _, client):
        found = frames(await stream(client, {"inputs": "a", "parameters": {"max_new_tokens": 2}}))
        once = await client.post("/generate", json={"inputs": "a", "parameters": {"max_new_tokens": 2}})
    error = {"error": "Request failed during generation: two workers died", "error_type": "generation"}
    assert len(found) == shown + 1 and found[-1] == error
    assert (once.status_code, once.json()) == (424, error)


async def test_100_streams_are_not_mixed_up(broker: Broker) -> None:
    def answer(request: Generate) -> Answer:
        return Answer(
            ids(TOKENIZER.decode([token_id[0] for token_id in [[i] for i in prompt(request)]]) + " and so on")
        )

    def prompt(request: Generate) -> list[int]:
        data = request.prompt_ids
        return [int.from_bytes(data[i : i + 4], "little") for i in range(0, len(data), 4)]

    async with answering(broker.url, answer) as (_, _, client):
        all_content = await asyncio.gather(*(stream(client, {"inputs": f"number {i}"}) for i in range(100)))
    for i, content in enumerate(all_content):
        assert frames(content)[-1]["generated_text"] == f"number {i} and so on"


async def test_frames_are_json_whatever_a_token_holds() -> None:
    text = "".join(map(chr, range(0x100))) + "\u2028\ufffd🙂"
    logprobs = unpack_floats(pack_floats([-1e-9, -3e-5, -20.5, float("-inf"), float("nan")]))
    one = Stream(Generate("r", "", pack_ids([1]), StoppingParams(9)), model_tokenizer())
    one.add_event(Tokens("r", 1, 0, pack_ids(ids("a") * 5), pack_floats(logprobs), [text] * 5))
    shown = await anext(bodies_of(one))
    assert [json.loads(body)["token"]["logprob"] for body in shown] == [*logprobs[:3], None, None]
    assert all(json.dumps(text, ensure_ascii=False).encode() in body for body in shown)


async def test_an_unexpected_end_repeats_no_token() -> None:
    one = Stream(Generate("r", "", pack_ids([1]), StoppingParams(9)), model_tokenizer())
    found = bodies_of(one)
    one.add_event(Tokens("r", 1, 0, pack_ids(ids("a")), pack_floats([-1.0]), ["a"]))
    assert [json.loads(body)["index"] for body in await anext(found)] == [1]
    one.end(Terminal("r", "length", 1))
    assert [json.loads(body) for body in await anext(found)] == [
        {"error": "Incomplete generation stream", "error_type": "incomplete_generation_stream"}
    ]
    with pytest.raises(StopAsyncIteration):
        await anext(found)
