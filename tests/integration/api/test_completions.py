"""/v1/completions through real HTTP and a real broker, from a worker whose tokens are scripted; and the
model's own sampling values, which are the defaults of requests on /v1 and of no others.
"""

import asyncio
from typing import Any

import pytest

from api.protocols.protocol import FINGERPRINT
from common.messages.records import unpack_ids
from common.messages.request import Generate
from deploy.launcher.embedded_broker import Broker
from tests.support.answers import CHAT, frames, logprobs, streamed
from tests.support.fleet.gateways import answering
from tests.support.fleet.scripted_worker import Answer
from tests.support.tokenizer import TOKENIZER, ids, tokenizer_with
from tests.support.waiting import wait_until

PATH = "/v1/completions"


def counts(num_prompt: int, num_new: int, num_cached: int = 0) -> dict[str, Any]:
    numbers = {"prompt_tokens": num_prompt, "completion_tokens": num_new}
    details = {"prompt_tokens_details": {"cached_tokens": num_cached}}
    return numbers | {"total_tokens": num_prompt + num_new} | details


def repeat(request: Generate) -> Answer:
    """Answer with the prompt and the number of the choice."""
    choice = request.sampling.choice if request.sampling else 0
    words = f"{TOKENIZER.decode(unpack_ids(request.prompt_ids))} {choice}"
    return Answer(ids(words), num_cached=16 * (1 + choice))


async def test_a_stream_is_text_completion_chunks(broker: Broker) -> None:
    async with answering(broker.url, Answer(ids(" é b"))) as (_, _, client):
        found = frames(
            await streamed(client, PATH, {"prompt": "a", "stream_options": {"include_usage": True}})
        )
    known = {
        "id": found[0]["id"],
        "object": "text_completion",
        "created": found[0]["created"],
        "model": "smollm2",
    }
    assert known["id"].startswith("cmpl-")
    known |= {"system_fingerprint": FINGERPRINT}
    choices = [
        {"index": 0, "text": " é", "logprobs": None, "finish_reason": None, "stop_reason": None},
        {"index": 0, "text": " b", "logprobs": None, "finish_reason": None, "stop_reason": None},
        {"index": 0, "text": "", "logprobs": None, "finish_reason": "stop", "stop_reason": None},
    ]
    usage = counts(1, 3)
    assert found == [
        *({**known, "choices": [choice], "usage": None} for choice in choices),
        {**known, "choices": [], "usage": usage},
    ]


async def test_choices_are_in_the_order_of_the_prompts(broker: Broker) -> None:
    async with answering(broker.url, repeat) as (worker, gateway, client):
        response = await client.post(PATH, json={"prompt": ["a b", "c", "d e f"], "n": 2})
        found = frames(await streamed(client, PATH, {"prompt": ["a b", "c", "d e f"], "n": 2}))
        await wait_until(lambda: not gateway.pool.relay.streams)
    answer = response.json()
    texts = ["a b 0", "a b 1", "c 0", "c 1", "d e f 0", "d e f 1"]
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == list(enumerate(texts))
    num_new = sum(len(ids(text)) + 1 for text in texts)
    assert answer["usage"] == counts(6, num_new, 3 * 16), "a prompt counts once"
    assert response.headers["x-prompt-tokens"] == "6" and response.headers["x-generated-tokens"] == str(
        num_new
    )
    assert response.headers["x-compute-characters"] == str(len("a bcd e f"))
    shown = [""] * 6
    for choice in (choice for frame in found for choice in frame["choices"]):
        shown[choice["index"]] += choice["text"]
    assert shown == texts
    assert len({request.request_id.partition(".")[0] for request in worker.seen}) == 2


async def test_prompts_are_texts_or_ids(broker: Broker) -> None:
    known: list[tuple[Any, list[list[int]]]] = [
        ("a b", [ids("a b")]),
        (["a", "b"], [ids("a"), ids("b")]),
        ([5, 6], [[5, 6]]),
        ([[5], [6, 7]], [[5], [6, 7]]),
    ]
    async with answering(broker.url, Answer(ids("x"))) as (worker, _, client):
        for prompt, prompts in known:
            assert (await client.post(PATH, json={"prompt": prompt})).status_code == 200
            assert [unpack_ids(request.prompt_ids) for request in worker.seen[-len(prompts) :]] == prompts


async def test_logprobs_are_parallel_lists(broker: Broker) -> None:
    """Special tokens are not in the text, and several tokens may share a character."""
    async with answering(broker.url, Answer(ids("a🙂 b"), ends=False)) as (_, _, client):
        body = {"prompt": "a", "max_tokens": 4}
        [choice] = (await client.post(PATH, json=body | {"logprobs": 2})).json()["choices"]
        [plain] = (await client.post(PATH, json=body | {"logprobs": 0})).json()["choices"]
        found = frames(await streamed(client, PATH, body | {"logprobs": 2}))
    lists = choice["logprobs"]
    assert choice["text"] == "a🙂 b"
    assert lists["tokens"] == ["a", "\ufffd", "\ufffd\ufffd", " b"]
    assert lists["text_offset"] == [0, 1, 1, 2]
    assert lists["token_logprobs"] == logprobs(4)
    assert lists["top_logprobs"][0] == {"a": logprobs(1)[0], "b": pytest.approx(logprobs(1)[0] - 1)}
    assert plain["logprobs"]["top_logprobs"][3] == {" b": logprobs(4)[3]}
    for name, values in lists.items():
        assert [value for frame in found for value in frame["choices"][0]["logprobs"][name]] == values


async def test_echo_puts_the_prompt_before_the_text(broker: Broker) -> None:
    async with answering(broker.url, Answer(ids(" b"))) as (_, _, client):
        for prompt, text in (("a é", "a é b"), (ids("a é"), "a é b")):
            assert (await client.post(PATH, json={"prompt": prompt, "echo": True})).json()["choices"][0][
                "text"
            ] == text
            found = frames(await streamed(client, PATH, {"prompt": prompt, "echo": True}))
            assert [frame["choices"][0]["text"] for frame in found] == ["a é", " b", ""]


def prompt_logprobs(prompt: list[int]) -> list[float | None]:
    """Log-probabilities of a prompt, as the fake worker has them."""
    return [None, *(-0.5 * i for i in range(1, len(prompt)))]


async def test_echo_with_logprobs_includes_the_prompt(broker: Broker) -> None:
    """The same lists, streamed or not: those of the prompt's tokens, then those of the choice's own."""
    body = {"prompt": ["a é b", "c d"], "n": 2, "echo": True}
    async with answering(broker.url, Answer(ids(" x"), ends=False)) as (worker, _, client):
        whole = (await client.post(PATH, json=body | {"max_tokens": 1, "logprobs": 2})).json()
        found = frames(await streamed(client, PATH, body | {"max_tokens": 1, "logprobs": 2}))
        [plain] = (
            await client.post(PATH, json={"prompt": "c d", "echo": True, "max_tokens": 1, "logprobs": 0})
        ).json()["choices"]
        assert [request.prompt_logprobs for request in worker.seen] == [2] * 8 + [0]
        await client.post(PATH, json=body | {"max_tokens": 1})
        await client.post(PATH, json={"prompt": "a", "max_tokens": 1, "logprobs": 2})
        assert {request.prompt_logprobs for request in worker.seen[9:]} == {None}
    assert [choice["text"] for choice in whole["choices"]] == ["a é b x", "a é b x", "c d x", "c d x"]
    first, _, third, _ = whole["choices"]
    assert first["logprobs"]["tokens"] == ["a", " é", " b", " x"]
    assert first["logprobs"]["token_logprobs"] == [*prompt_logprobs(ids("a é b")), *logprobs(1)]
    assert first["logprobs"]["text_offset"] == [0, 1, 3, 5]
    beside = TOKENIZER.decode([ids(" b")[0] + 1])
    assert first["logprobs"]["top_logprobs"][0] is None
    assert first["logprobs"]["top_logprobs"][2] == {" b": -1.0, beside: -2.0}
    assert third["logprobs"]["token_logprobs"] == [*prompt_logprobs(ids("c d")), *logprobs(1)]
    assert plain["logprobs"]["top_logprobs"] == [None, {" d": -0.5}, {" x": logprobs(1)[0]}]
    for choice in whole["choices"]:
        parts = [one for frame in found for one in frame["choices"] if one["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        for name, values in choice["logprobs"].items():
            assert [value for part in parts for value in part["logprobs"][name]] == values


async def test_max_tokens_of_zero_scores_the_prompt(broker: Broker) -> None:
    """One token is generated nevertheless; it is neither shown nor counted."""
    async with answering(broker.url, Answer([])) as (worker, _, client):
        body = {
            "prompt": ids("a é b"),
            "echo": True,
            "max_tokens": 0,
            "logprobs": 0,
            "stream_options": {"include_usage": True},
        }
        found = frames(await streamed(client, PATH, body))
        answer = await client.post(PATH, json=body | {"stream_options": None})
        [bare] = (await client.post(PATH, json={"prompt": "a", "echo": True, "max_tokens": 0})).json()[
            "choices"
        ]
    [choice] = answer.json()["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("a é b", "length", None)
    assert choice["logprobs"]["tokens"] == ["a", " é", " b"] and choice["logprobs"][
        "token_logprobs"
    ] == prompt_logprobs(ids("a é b"))
    assert choice["logprobs"]["text_offset"] == [0, 1, 3]
    usage = counts(3, 0)
    assert (
        answer.json()["usage"] == found[-1]["usage"] == usage and answer.headers["x-generated-tokens"] == "0"
    )
    assert [frame["choices"][0]["text"] for frame in found[:-1]] == ["a é b", ""]
    assert (
        found[0]["choices"][0]["logprobs"] == choice["logprobs"]
        and found[1]["choices"][0]["finish_reason"] == "length"
    )
    assert (bare["text"], bare["logprobs"], worker.seen[-1].stopping.max_new_tokens) == ("a", None, 1)


async def test_special_tokens_are_shown_on_request(broker: Broker) -> None:
    answer = Answer([*ids("a"), TOKENIZER.token_to_id("<|im_start|>"), *ids(" b")])  # type: ignore[list-item]
    async with answering(broker.url, answer) as (_, _, client):
        for body, text in (({}, "a b"), ({"skip_special_tokens": False}, "a<|im_start|> b")):
            assert (await client.post(PATH, json={"prompt": "a", **body})).json()["choices"][0][
                "text"
            ] == text


async def test_a_failed_prompt_fails_all_choices(broker: Broker) -> None:
    def answer(request: Generate) -> Answer:
        return (
            Answer(ids("x"), error="poison")
            if unpack_ids(request.prompt_ids) == ids("bad")
            else Answer(ids("a b c"), ends=False)
        )

    async with answering(broker.url, answer) as (worker, gateway, client):
        found = frames(await streamed(client, PATH, {"prompt": ["good", "bad"]}))
        await wait_until(lambda: not worker.live and not gateway.pool.relay.streams)
    assert found[-1]["error"]["message"].endswith("while they worked on this request")


async def test_all_prompts_or_none_are_admitted(broker: Broker) -> None:
    async with answering(broker.url, Answer(ids("x"), ends=False), max_concurrent_requests=3) as (
        worker,
        gateway,
        client,
    ):
        task = asyncio.create_task(client.post(PATH, json={"prompt": ["a", "b"]}))
        await wait_until(lambda: len(worker.live) == 2)
        refused = await client.post(PATH, json={"prompt": ["a", "b"], "stream": True})
        assert (refused.status_code, refused.json()["error"]["type"]) == (429, "rate_limit_exceeded")
        await wait_until(lambda: len(worker.live) == 2 and len(gateway.pool.relay.streams) == 2)
        never = await client.post(PATH, json={"prompt": ["a", "b"], "n": 2})
        assert (never.status_code, never.json()["error"]["param"]) == (
            400,
            "n",
        ) and "MAX_CONCURRENT_REQUESTS is 3" in never.text
        task.cancel()
        await wait_until(lambda: not worker.live and not gateway.pool.relay.streams)


async def test_the_number_of_prompts_is_limited(broker: Broker) -> None:
    """Texts, and lists of ids; an operator may lower the limit by MAX_CLIENT_BATCH_SIZE."""
    texts = [f"{i}, {i + 1}," for i in range(40)]
    async with answering(
        broker.url, lambda request: Answer([request.prompt_ids[0]]), max_concurrent_requests=50
    ) as (_, _, client):
        by_text = await client.post("/v1/completions", json={"prompt": texts})
        by_ids = await client.post("/v1/completions", json={"prompt": [ids(text) for text in texts]})
        beyond = await client.post("/v1/completions", json={"prompt": texts, "n": 2})
    assert by_text.status_code == 200, by_text.text
    chosen = [choice["text"] for choice in by_text.json()["choices"]]
    assert len(chosen) == 40 and chosen == [choice["text"] for choice in by_ids.json()["choices"]]
    assert beyond.status_code == 400 and "MAX_CONCURRENT_REQUESTS is 50" in beyond.json()["error"]["message"]
    async with answering(broker.url, Answer([11]), max_client_batch_size=4) as (_, _, client):
        refused = (await client.post("/v1/completions", json={"prompt": texts[:5]})).json()["error"]
        assert "1 to 4 items" in refused["message"]


DEFAULTS = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "max_new_tokens": 5}
ROUTES: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", CHAT, "max_tokens"),
    ("/v1/completions", {"prompt": "Hi"}, "max_tokens"),
    ("/v1/responses", {"input": "Hi"}, "max_output_tokens"),
]


async def test_a_request_without_values_gets_the_model_s(broker: Broker) -> None:
    async with answering(broker.url, Answer([11])) as (worker, gateway, client):
        gateway.pool.tokenizer = tokenizer_with(sampling_defaults=DEFAULTS)

        async def seen(path: str, body: dict[str, Any]) -> tuple[Any, int]:
            assert (await client.post(path, json=body)).status_code == 200
            return worker.seen[-1].sampling, worker.seen[-1].stopping.max_new_tokens

        for path, body, length in ROUTES:
            sampling, most = await seen(path, body)
            assert (sampling.temperature, sampling.top_k, sampling.top_p, most) == (0.6, 20, 0.95, 5)
            own, most = await seen(path, body | {"temperature": 1.0, "top_k": 0, length: 3})
            assert (own.temperature, own.top_k, own.top_p, most) == (1.0, 0, 0.95, 3)
            _, most = await seen(path, body | {length: 50})
            assert most == 5, "as in vLLM, it is the most that a request gets"
        greedy, most = await seen(
            "/v1/chat/completions", CHAT | {"temperature": 0, "max_completion_tokens": 2}
        )
        assert (greedy, most) == (None, 2)
        plain, most = await seen("/generate", {"inputs": "Hi"})
        assert plain is None and most > 5, "TGI's routes keep TGI's defaults"
