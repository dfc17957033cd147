"""Parameters that TGI's routes refuse: the error names field and limit, and nothing reaches the queue."""

import json
from typing import Any

import httpx
import pytest

from deploy.launcher.embedded_broker import Broker
from tests.support.fleet.gateways import answering
from tests.support.fleet.scripted_worker import Answer
from tests.support.tokenizer import model_tokenizer

SIZE = model_tokenizer().size


CASES: list[
    tuple[Any, int, str]
] = [  # parameters, or a whole body with `inputs`; status; words of the answer
    ({"max_new_tokens": 0}, 422, "`max_new_tokens` must be at least 1. Given: 0"),
    ({"max_new_tokens": -1}, 422, "`max_new_tokens` must be at least 1. Given: -1"),
    ({"max_new_tokens": 1.5}, 422, "`parameters.max_new_tokens`"),
    ({"max_new_tokens": "5"}, 422, "`parameters.max_new_tokens`"),
    ({"max_new_tokens": True}, 422, "`parameters.max_new_tokens`"),
    (
        {"max_new_tokens": 1024},
        422,
        "must be at most 1024. Given: 1 `inputs` tokens and 1024 `max_new_tokens`",
    ),
    ({"max_new_tokens": 10**400}, 422, "`max_new_tokens`"),
    ({"min_new_tokens": 5, "max_new_tokens": 4}, 422, "`min_new_tokens` must be at most 4. Given: 5"),
    ({"stop": ["a"] * 5}, 422, "`stop` supports up to 4 stop sequences. Given: 5"),
    ({"stop": [""]}, 422, "`stop`"),
    ({"stop": "a"}, 422, "`parameters.stop`"),
    ({"stop": [1]}, 422, "`parameters.stop[0]`"),
    (
        {"stop_token_ids": [1, SIZE]},
        422,
        f"`stop_token_ids` must have token ids of at least 0 and below {SIZE}. Given: {SIZE}",
    ),
    ({"stop_token_ids": [-1]}, 422, "`stop_token_ids` must have token ids of at least 0"),
    ({"stop_token_ids": [1] * 129}, 422, "`stop_token_ids` supports up to 128 token ids. Given: 129"),
    ({"truncate": 0}, 422, "`truncate` must be at least 1. Given: 0"),
    ({"truncate": 1024}, 422, "`truncate` must be at most 1023. Given: 1024"),
    ({"details": "yes"}, 422, "`parameters.details`"),
    ({"temperature": -0.5}, 422, "`temperature` must be at least 0 and at most 100. Given: -0.5"),
    ({"temperature": 101}, 422, "`temperature` must be at least 0 and at most 100. Given: 101"),
    ({"temperature": "hot"}, 422, "`parameters.temperature`"),
    ({"repetition_penalty": 0}, 422, "`repetition_penalty` must be above 0 and at most 100. Given: 0"),
    ({"frequency_penalty": 2.1}, 422, "`frequency_penalty` must be at least -2 and at most 2. Given: 2.1"),
    ({"presence_penalty": -2.1}, 422, "`presence_penalty` must be at least -2 and at most 2. Given: -2.1"),
    ({"top_k": -2}, 422, "`top_k` must be at least -1. Given: -2"),
    ({"top_k": 1.5}, 422, "`parameters.top_k`"),
    ({"top_p": 1.1}, 422, "`top_p` must be at least 0 and at most 1. Given: 1.1"),
    ({"top_p_decay": 0}, 422, "`top_p_decay` must be above 0 and at most 1. Given: 0"),
    ({"top_p_reset_ids": [-1]}, 422, "`top_p_reset_ids` must have token ids of at least 0"),
    ({"min_p": -0.1}, 422, "`min_p` must be at least 0 and at most 1. Given: -0.1"),
    ({"typical_p": 0}, 422, "`typical_p` must be above 0 and at most 1. Given: 0"),
    ({"do_sample": 1}, 422, "`parameters.do_sample`"),
    ({"seed": 2**64}, 422, "`seed` must be"),
    ({"seed": "1"}, 422, "`parameters.seed`"),
    (
        {"logit_bias": {"5": 101}},
        422,
        "`logit_bias` must have values of at least -100 and at most 100. Given: 101",
    ),
    (
        {"logit_bias": {str(SIZE): 1}},
        422,
        f"`logit_bias` must have token ids of at least 0 and below {SIZE}. Given: {SIZE}",
    ),
    (
        {"logit_bias": {str(i): 1 for i in range(1025)}},
        422,
        "`logit_bias` supports up to 1024 token ids. Given: 1025",
    ),
    ({"logit_bias": {"five": 1}}, 422, "`parameters.logit_bias.five"),
    ({"logit_bias": [1.0]}, 422, "`parameters.logit_bias`"),
    ({"bad_words": [" "]}, 422, "`bad_words` must have words of 1 to 200 characters. Given: 0"),
    ({"bad_words": ["a" * 201]}, 422, "`bad_words` must have words of 1 to 200 characters. Given: 201"),
    ({"bad_words": ["a"] * 129}, 422, "`bad_words` supports up to 128 words. Given: 129"),
    ({"best_of": 3, "do_sample": True}, 422, "`best_of` must be at most 2. Given: 3"),
    ({"best_of": -1}, 422, "`parameters.best_of`"),
    ({"best_of": 2}, 422, "`best_of`"),
    ({"top_n_tokens": 21}, 422, "`top_n_tokens` must be at most 20. Given: 21"),
    ({"adapter_id": "a"}, 422, "`adapter_id`: there is no adapter 'a'"),
    ({"watermark": "yes"}, 422, "`parameters.watermark`"),
    ({"allowed_token_ids": []}, 422, "`allowed_token_ids` cannot be empty"),
    ({"allowed_token_ids": [10**6]}, 422, "`allowed_token_ids` must have token ids"),
    ({"decoder_input_details": 1}, 422, "`parameters.decoder_input_details`"),
    ({"grammar": {"type": "json_object"}}, 422, "`grammar.value` is required"),
    ({"grammar": {"type": "regex", "value": "("}}, 422, "`grammar.value` cannot be compiled: "),
    ({"stop_token_ids": ["a", "b"]}, 422, "`parameters.stop_token_ids[0]`: Input should be a valid integer"),
    ({"adapter_id": 1}, 422, "`parameters.adapter_id`"),
    ({"max_tokens": 5}, 422, "`max_tokens` is not a field of this route"),
    ({"response_format": {"type": "json_object"}}, 422, "`response_format` is not a field of this route"),
    (
        {"stop": ["a", "b" * 1001]},
        422,
        "`stop` must have stop sequences of at most 1000 characters. Given: 1001",
    ),
    (b'{"inputs":"a","parameters":{"temperature":NaN}}', 422, "`temperature` must be"),
    (b'{"inputs":"a","parameters":{"temperature":1e999}}', 422, "`temperature` must be"),
    (b'{"inputs":"a","parameters":{"logit_bias":{"1":NaN}}}', 422, "`logit_bias` must have values"),
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


async def post(client: httpx.AsyncClient, case: Any, path: str = "/generate") -> httpx.Response:
    body = (
        case
        if isinstance(case, bytes)
        else json.dumps(case if "inputs" in case else {"inputs": "a", "parameters": case}).encode()
    )
    return await client.post(path, content=body, headers={"content-type": "application/json"})


@pytest.mark.parametrize(
    ("path", "cases"), [("/generate", CASES), ("/generate_stream", CASES[::6]), ("/", CASES[::6])]
)
async def test_refusals_name_the_field_and_the_limit(
    broker: Broker, path: str, cases: list[tuple[Any, int, str]]
) -> None:
    async with answering(broker.url, Answer([])) as (worker, _, client):
        wrong = []
        for case, status, words in cases:
            response = await post(client, case, path)
            error_type = "validation" if status == 422 else "invalid_json"
            prefix = "Input validation error: " if status == 422 else ""
            answer = response.json()
            if (
                response.status_code != status
                or set(answer) != {"error", "error_type"}
                or answer["error_type"] != error_type
            ):
                wrong.append((case, response.status_code, answer))
            elif words not in answer["error"] or not answer["error"].startswith(prefix):
                wrong.append((case, words, answer))  # type: ignore[arg-type]
        assert not wrong
        assert not worker.seen


async def test_best_of_needs_sampling_without_a_seed_or_stream(broker: Broker) -> None:
    cases = [
        ("/generate", {"best_of": 2}, "`best_of` above 1 needs sampling"),
        (
            "/generate",
            {"best_of": 2, "temperature": 0, "do_sample": True},
            "`best_of` above 1 needs sampling",
        ),
        (
            "/generate",
            {"best_of": 2, "do_sample": True, "seed": 1},
            "`seed` must not be set when `best_of` is above 1",
        ),
        (
            "/generate_stream",
            {"best_of": 2, "do_sample": True},
            "`best_of` must be 1 when tokens are streamed. Given: 2",
        ),
    ]
    async with answering(broker.url, Answer([])) as (_, _, client):
        for path, parameters, words in cases:
            response = await post(client, parameters, path)
            assert response.status_code == 422 and words in response.json()["error"], response.text
        both = {"inputs": "a", "stream": True, "parameters": {"best_of": 2, "do_sample": True}}
        assert "when tokens are streamed" in (await post(client, both, "/")).text


async def test_settings_lower_the_limits(broker: Broker) -> None:
    settings: dict[str, Any] = {
        "max_total_tokens": 20,
        "max_input_tokens": 3,
        "max_stop_sequences": 1,
        "max_best_of": 1,
        "max_top_n_tokens": 0,
    }
    async with answering(broker.url, Answer([]), **settings) as (_, _, client):
        assert "at most 3 tokens. Given: 4" in (await post(client, {"inputs": "one two three four"})).text
        assert "at most 20. Given: 1" in (await post(client, {"max_new_tokens": 20})).text
        assert "up to 1 stop" in (await post(client, {"stop": ["a", "b"]})).text
        assert "`best_of` must be at most 1" in (await post(client, {"best_of": 2, "do_sample": True})).text
        assert "`top_n_tokens` must be at most 0" in (await post(client, {"top_n_tokens": 1})).text
