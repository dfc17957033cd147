"""What TGI's routes do beyond plain text: several answers, the likeliest tokens, seeds, the prompt before the
text, POST /.
"""

import json
from typing import Any

import httpx
import pytest

from api.protocols.tgi import rank
from api.streams.stream import Stream
from common.messages.events import Terminal, Tokens
from common.messages.records import pack_floats, pack_ids, unpack_floats
from common.messages.request import Generate, SamplingParams, StoppingParams
from deploy.launcher.embedded_broker import Broker
from tests.integration.api.tgi.test_frames import frames as parsed
from tests.support.answers.tgi_bodies import bodies_of
from tests.support.fleet.gateways import answering
from tests.support.fleet.scripted_worker import EOS, Answer
from tests.support.tokenizer import TOKENIZER, ids, model_tokenizer
from tests.support.waiting import wait_until


def described(token_id: int, logprob: float) -> dict[str, Any]:
    """Return a token as TGI shows it."""
    logprob = unpack_floats(pack_floats([logprob]))[0]
    return {
        "id": token_id,
        "text": TOKENIZER.decode([token_id], skip_special_tokens=False),
        "logprob": logprob,
        "special": token_id in model_tokenizer().special_ids,
    }


async def test_top_tokens_are_in_frames_and_details(broker: Broker) -> None:
    """In a stream they are in each frame, otherwise in the details."""
    body = {"inputs": "Hi", "parameters": {"details": True, "top_n_tokens": 2, "do_sample": True, "seed": 7}}
    async with answering(broker.url, Answer(ids("one two"))) as (_, _, client):
        whole = (await client.post("/generate", json=body)).json()
        shown = parsed((await client.post("/generate_stream", json=body)).content)
    tokens = [described(token_id, -0.1 - i / 7) for i, token_id in enumerate([*ids("one two"), EOS])]
    tops = [[token, described(token["id"] + 1, token["logprob"] - 1)] for token in tokens]
    about = {"finish_reason": "eos_token", "generated_tokens": 3, "seed": 7}
    assert whole == {
        "generated_text": "one two",
        "details": about | {"prefill": [], "tokens": tokens, "top_tokens": tops},
    }
    assert list(whole["details"]) == [
        "finish_reason",
        "generated_tokens",
        "seed",
        "prefill",
        "tokens",
        "top_tokens",
    ]
    assert [frame["top_tokens"] for frame in shown] == tops
    assert list(shown[0]) == ["index", "token", "top_tokens", "generated_text", "details"]
    assert shown[-1]["details"] == about | {"input_length": 1}


async def test_decoder_input_details_are_in_the_answer(broker: Broker) -> None:
    """Ids and log-probabilities of the prompt; the first token has no log-probability, and streams have none
    at all. `details` need not be set.
    """
    common = {"do_sample": True, "top_n_tokens": 2, "decoder_input_details": True}
    prompt = ids("one two three")
    texts = ["one", " two", " three"]
    prefill = [{"id": prompt[i], "text": texts[i], "logprob": -0.5 * i if i else None} for i in range(3)]
    async with answering(broker.url, Answer(ids(" x"))) as (worker, _, client):

        async def generate(inputs: str, path: str = "/generate", **parameters: Any) -> Any:
            return (
                await client.post(path, json={"inputs": inputs, "parameters": common | parameters})
            ).json()

        answer = await generate("one two three")
        assert list(answer["details"]) == [
            "finish_reason",
            "generated_tokens",
            "seed",
            "prefill",
            "tokens",
            "top_tokens",
        ]
        assert answer["details"]["prefill"] == prefill and len(answer["details"]["tokens"]) == 2
        assert (await generate("one two three", truncate=2))["details"]["prefill"] == [
            {"id": token_id, "text": text, "logprob": logprob}
            for token_id, text, logprob in zip(prompt[1:], texts[1:], [None, -0.5], strict=True)
        ]
        assert (await generate("one"))["details"]["prefill"] == [prefill[0]]
        best = (await generate("one two three", best_of=2))["details"]
        assert best["prefill"] == best["best_of_sequences"][0]["prefill"] == prefill
        assert (await generate("one two three", "/"))[0]["details"]["prefill"] == prefill
        assert "details" not in await generate("one two three", decoder_input_details=False)
        assert (await generate("one two", decoder_input_details=None, details=True))["details"][
            "prefill"
        ] == []
        assert [request.prompt_logprobs for request in worker.seen] == [0] * 6 + [None, None]
        for path, fields in (("/generate_stream", {}), ("/", {"stream": True})):
            refused = await client.post(path, json={"inputs": "one", "parameters": common, **fields})
            error = "Input validation error: `decoder_input_details` must be false when tokens are streamed"
            assert (refused.status_code, refused.json()) == (
                422,
                {"error": error, "error_type": "validation"},
            )


@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
async def test_details_have_a_seed_if_tokens_were_sampled(broker: Broker, path: str) -> None:
    async def seed(client: httpx.AsyncClient, parameters: dict[str, Any]) -> Any:
        response = await client.post(
            path, json={"inputs": "Hi", "parameters": {"details": True} | parameters}
        )
        answer = parsed(response.content)[-1] if path == "/generate_stream" else response.json()
        return answer["details"]["seed"]

    async with answering(broker.url, Answer(ids("one"))) as (worker, _, client):
        assert await seed(client, {"temperature": 0.5, "seed": 2**64 - 1}) == 2**64 - 1
        assert await seed(client, {"seed": 5}) is None
        assert await seed(client, {"repetition_penalty": 1.5, "seed": 5}) is None
        drawn = await seed(client, {"top_k": 3})
        assert drawn == worker.seen[-1].sampling.seed and 0 <= drawn < 2**63  # type: ignore[union-attr]


async def test_best_of_returns_the_likeliest_answer(broker: Broker) -> None:
    """Here the shorter one is the likelier. Each has a seed of its own, which is in its details."""
    texts = iter(["one two three", "one"])
    body = {
        "inputs": "Hi",
        "parameters": {"details": True, "best_of": 2, "temperature": 0.7, "return_full_text": True},
    }
    async with answering(broker.url, lambda _: Answer(ids(next(texts)))) as (worker, _, client):
        response = await client.post("/generate", json=body)
    answer = response.json()
    assert answer["generated_text"] == "Hione"
    assert list(answer["details"]) == [
        "finish_reason",
        "generated_tokens",
        "seed",
        "prefill",
        "tokens",
        "best_of_sequences",
    ]
    [other] = answer["details"]["best_of_sequences"]
    assert list(other) == ["generated_text", "finish_reason", "generated_tokens", "seed", "prefill", "tokens"]
    assert (other["generated_text"], other["generated_tokens"]) == ("Hione two three", 4)
    assert [request.sampling.seed for request in worker.seen] == [other["seed"], answer["details"]["seed"]]  # type: ignore[union-attr]
    assert [request.sampling.choice for request in worker.seen] == [0, 0] and other["seed"] != answer[  # type: ignore[union-attr]
        "details"
    ]["seed"]
    assert [request.request_id for request in worker.seen] == [
        f"{response.headers['x-request-id']}.{i}" for i in (0, 1)
    ]
    assert response.headers["x-generated-tokens"] == "2"


async def test_one_failed_answer_fails_the_request(broker: Broker) -> None:
    answers = iter([Answer(ids("one")), Answer([], error="two workers died")])
    async with answering(broker.url, lambda _: next(answers)) as (_, gateway, client):
        response = await client.post(
            "/generate", json={"inputs": "Hi", "parameters": {"best_of": 2, "do_sample": True}}
        )
        assert (response.status_code, response.json()["error_type"]) == (424, "generation")
        await wait_until(lambda: not gateway.pool.relay.streams)


async def test_best_of_admits_all_requests_or_none(broker: Broker) -> None:
    body = {"inputs": "Hi", "parameters": {"best_of": 2, "do_sample": True}}
    endless = Answer(ids("one") * 200, ends=False)
    async with answering(broker.url, endless, max_concurrent_requests=1) as (worker, gateway, client):
        await worker.pause()
        response = await client.post("/generate", json=body)
        assert (response.status_code, response.json()["error_type"]) == (429, "overloaded")
        worker.going.set()

        async def nothing_is_left() -> bool:
            return not gateway.pool.relay.streams and not await worker.redis.xlen(worker.keys.requests)

        await wait_until(nothing_is_left)


async def test_post_to_the_root_returns_an_array_or_a_stream(broker: Broker) -> None:
    """The text begins with the prompt unless `return_full_text` is false."""
    async with answering(broker.url, Answer(ids(" one"))) as (_, _, client):

        async def text(**fields: Any) -> Any:
            return (await client.post("/", json={"inputs": "Hi"} | fields)).json()

        assert await text() == [{"generated_text": "Hi one"}]
        assert await text(stream=None, parameters={"return_full_text": None}) == [
            {"generated_text": "Hi one"}
        ]
        assert await text(parameters={"return_full_text": False}) == [{"generated_text": " one"}]
        streamed = await client.post("/", json={"inputs": "Hi", "stream": True})
        assert streamed.headers["content-type"] == "text/event-stream"
        assert [frame["generated_text"] for frame in parsed(streamed.content)] == [None, "Hi one"]
        same = await client.post(
            "/generate_stream", json={"inputs": "Hi", "parameters": {"return_full_text": True}}
        )
        assert same.content == streamed.content
        for path in ("/generate", "/generate_stream"):
            plain = await client.post(path, json={"inputs": "Hi"})
            assert b'"generated_text":" one"' in plain.content


async def test_a_stop_id_ends_an_answer_and_is_part_of_it(broker: Broker) -> None:
    two = ids(" two")[0]
    body = {"inputs": "Hi", "parameters": {"stop_token_ids": [two], "details": True}}
    async with answering(broker.url, Answer(ids("one two three"))) as (_, _, client):
        whole = (await client.post("/generate", json=body)).json()
        last = parsed((await client.post("/generate_stream", json=body)).content)[-1]
    assert (whole["generated_text"], whole["details"]["finish_reason"]) == ("one two", "stop_sequence")
    assert (last["generated_text"], last["details"]["finish_reason"], last["token"]["id"]) == (
        "one two",
        "stop_sequence",
        two,
    )


def ended(logprobs: list[float]) -> Stream:
    one = Stream(
        Generate("r", "", pack_ids([1]), StoppingParams(9), sampling=SamplingParams(temperature=1.0, seed=3)),
        model_tokenizer(),
    )
    one.add_event(
        Tokens("r", 1, 0, pack_ids([5] * len(logprobs)), pack_floats(logprobs), ["x"] * len(logprobs))
    )
    one.end(Terminal("r", "length", len(logprobs)))
    return one


def test_the_best_has_the_highest_mean_log_probability() -> None:
    """Not the highest sum: here the longer answer is the better one."""
    short, long = ended([-1.0]), ended([-0.5, -0.6, -0.7])
    assert rank([short, long]) == [long, short]


async def test_the_last_frame_has_details_if_they_are_requested() -> None:
    for with_details in (True, False):
        [[body]] = [one async for one in bodies_of(ended([-1.0]), with_details)]
        assert (json.loads(body)["details"] is not None) is with_details
