"""What is refused before it reaches the queue: each case says what must stand in the answer."""

import json
from typing import Any

import httpx
import pytest

from deploy.broker import Broker
from tests.fake_worker import Answer, working
from tests.gateways import ready, serving, vocabulary

TOKENIZER = vocabulary().tokenizer

CASES: list[tuple[Any, int, str]] = [  # parameters, or a whole body with `inputs`; status; words of the answer
    ({"max_new_tokens": 0}, 422, "`max_new_tokens` must be strictly positive. Given: 0"),
    ({"max_new_tokens": -1}, 422, "`parameters.max_new_tokens`"),
    ({"max_new_tokens": 1.5}, 422, "`parameters.max_new_tokens`"),
    ({"max_new_tokens": "5"}, 422, "`parameters.max_new_tokens`"),
    ({"max_new_tokens": True}, 422, "`parameters.max_new_tokens`"),
    ({"max_new_tokens": 1024}, 422, "must be at most 1024. Given: 1 `inputs` tokens and 1024 `max_new_tokens`"),
    ({"max_new_tokens": 10**400}, 422, "`max_new_tokens`"),
    ({"stop": ["a"] * 5}, 422, "`stop` supports up to 4 stop sequences. Given: 5"),
    ({"stop": [""]}, 422, "`stop`"),
    ({"stop": "a"}, 422, "`parameters.stop`"),
    ({"stop": [1]}, 422, "`parameters.stop.0`"),
    ({"truncate": 0}, 422, "`truncate` must be strictly positive and at most 1023. Given: 0"),
    ({"truncate": 1024}, 422, "at most 1023. Given: 1024"),
    ({"details": "yes"}, 422, "`parameters.details`"),
    ({"temperature": 0.5}, 422, "`temperature` is not supported yet"),
    ({"temperature": "hot"}, 422, "`parameters.temperature`"),
    ({"repetition_penalty": 1.1}, 422, "`repetition_penalty` is not supported yet"),
    ({"frequency_penalty": 0.1}, 422, "`frequency_penalty` is not supported yet"),
    ({"top_k": 10}, 422, "`top_k` is not supported yet"),
    ({"top_p": 0.9}, 422, "`top_p` is not supported yet"),
    ({"typical_p": 0.9}, 422, "`typical_p` is not supported yet"),
    ({"do_sample": True}, 422, "`do_sample` is not supported yet"),
    ({"best_of": 2}, 422, "`best_of` is not supported yet"),
    ({"return_full_text": True}, 422, "`return_full_text` is not supported yet"),
    ({"watermark": True}, 422, "`watermark` is not supported yet"),
    ({"decoder_input_details": True}, 422, "`decoder_input_details` is not supported yet"),
    ({"seed": 0}, 422, "`seed` is not supported yet"),
    ({"top_n_tokens": 2}, 422, "`top_n_tokens` is not supported yet"),
    ({"grammar": {"type": "regex", "value": "a"}}, 422, "`grammar` is not supported yet"),
    ({"adapter_id": "x"}, 422, "`adapter_id` is not supported yet"),
    (b'{"inputs":"a","parameters":{"temperature":NaN}}', 422, "`temperature` is not supported yet"),
    (b'{"inputs":"a","parameters":{"temperature":1e999}}', 422, "`temperature` is not supported yet"),
    (b'{"inputs":"a","parameters":{"max_new_tokens":NaN}}', 422, "`parameters.max_new_tokens`"),
    (b'{"inputs":"a","parameters":{"max_new_tokens":1' + b"0" * 5000 + b"}}", 400, "out of range"),
    ({"inputs": ""}, 422, "`inputs` cannot be empty"),
    ({"inputs": "word " * 2000}, 422, "`inputs` must have at most 1023 tokens. Given: 200"),
    ({"inputs": None}, 422, "`inputs`"),
    ({"inputs": ["a"]}, 422, "`inputs`"),
    ({"inputs": "a", "parameters": []}, 422, "`parameters`"),
    (b"{}", 422, "`inputs`: Field required"),
    (b"[]", 422, "`body`"),
    (b"null", 422, "`body`"),
    (b"", 400, "Invalid JSON"),
    (b"{", 400, "Invalid JSON"),
    (b'{"inputs":"a"} b', 400, "Invalid JSON"),
    (b'{"inputs":"\xff"}', 400, "Invalid JSON"),
    (b'{"inputs":"\\ud800"}', 400, "Invalid JSON"),
    (b"[" * 100_000, 400, "Invalid JSON"),
]
NEUTRAL: dict[str, Any] = {
    "best_of": 1,
    "temperature": 1,
    "repetition_penalty": 1.0,
    "frequency_penalty": 0,
    "top_k": 0,
    "top_p": 1.0,
    "typical_p": 1.0,
    "do_sample": False,
    "return_full_text": False,
    "watermark": False,
    "decoder_input_details": False,
    "top_n_tokens": 0,
}


async def post(client: httpx.AsyncClient, case: Any, path: str = "/generate") -> httpx.Response:
    body = case if isinstance(case, bytes) else json.dumps(case if "inputs" in case else {"inputs": "a", "parameters": case}).encode()
    return await client.post(path, content=body, headers={"content-type": "application/json"})


@pytest.mark.parametrize(("path", "cases"), [("/generate", CASES), ("/generate_stream", CASES[::6])])
async def test_refusals_name_the_field_and_the_limit(broker: Broker, path: str, cases: list[tuple[Any, int, str]]) -> None:
    async with working(broker.url, TOKENIZER, lambda _: Answer([])) as worker, serving(broker.url) as (gateway, client):
        await ready(gateway)
        wrong = []
        for case, status, words in cases:
            response = await post(client, case, path)
            error_type = "validation" if status == 422 else "invalid_json"
            prefix = "Input validation error: " if status == 422 else ""
            answer = response.json()
            if response.status_code != status or set(answer) != {"error", "error_type"} or answer["error_type"] != error_type:
                wrong.append((case, response.status_code, answer))
            elif words not in answer["error"] or not answer["error"].startswith(prefix):
                wrong.append((case, words, answer))
        assert not wrong
        assert not worker.seen


async def test_neutral_values_and_null_are_accepted(broker: Broker) -> None:
    one = Answer(TOKENIZER.encode("a").ids)
    async with working(broker.url, TOKENIZER, lambda _: one), serving(broker.url) as (gateway, client):
        await ready(gateway)
        for parameters in (NEUTRAL, dict.fromkeys([*NEUTRAL, "seed", "grammar", "adapter_id", "stop", "truncate", "max_new_tokens"])):
            response = await post(client, parameters)
            assert (response.status_code, response.text) == (200, '{"generated_text":"a"}')


async def test_odd_but_valid_inputs_are_served(broker: Broker) -> None:
    one = Answer(TOKENIZER.encode("a").ids)
    async with working(broker.url, TOKENIZER, lambda _: one) as worker, serving(broker.url) as (gateway, client):
        await ready(gateway)
        for inputs in ("a\x00b", "\ufffd", "\u2028", "  ", "👩‍👩‍👧‍👦"):
            assert (await post(client, {"inputs": inputs, "parameters": {"stop": [inputs]}})).status_code == 200
        assert worker.seen[0].stop == ["a\x00b"]


async def test_long_prompts_can_be_truncated(broker: Broker) -> None:
    one = Answer(TOKENIZER.encode("a").ids)
    async with working(broker.url, TOKENIZER, lambda _: one) as worker, serving(broker.url) as (gateway, client):
        await ready(gateway)
        assert (await post(client, {"inputs": "word " * 3000, "parameters": {"truncate": 1000}})).status_code == 200
        assert (len(worker.seen[0].prompt_ids) // 4, worker.seen[0].max_new_tokens) == (1000, 24)


async def test_settings_lower_the_limits(broker: Broker) -> None:
    async with (
        working(broker.url, TOKENIZER, lambda _: Answer([])),
        serving(broker.url, max_total_tokens=20, max_input_tokens=3, max_stop_sequences=1) as (gateway, client),
    ):
        await ready(gateway)
        assert "at most 3 tokens. Given: 4" in (await post(client, {"inputs": "one two three four"})).text
        assert "at most 20. Given: 1" in (await post(client, {"max_new_tokens": 20})).text
        assert "up to 1 stop" in (await post(client, {"stop": ["a", "b"]})).text
