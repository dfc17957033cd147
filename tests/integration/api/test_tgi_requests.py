"""Requests on TGI's routes: which parameters are refused by name and limit, what reaches the worker,
/tokenize and /info.
"""

import json
from typing import Any

import httpx
import pytest

from common.messages.request import SamplingParams, StoppingParams
from deploy.launcher.embedded_broker import Broker
from tests.integration.api.test_chat import BECOME, OTHERS, SAMPLED
from tests.support.fleet.gateways import answering, ready, serving
from tests.support.fleet.scripted_worker import Answer, working
from tests.support.tokenizer import TOKENIZER, ids, model_tokenizer

SIZE = model_tokenizer().size


CASES: list[
    tuple[Any, int, str]
] = [  # parameters, or a whole body with `inputs`; status; words of the answer
    ({"max_new_tokens": 0}, 422, "`max_new_tokens` must be at least 1. Given: 0"),
    ({"max_new_tokens": 1.5}, 422, "`parameters.max_new_tokens`"),
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
    ({"stop_token_ids": [1] * 129}, 422, "`stop_token_ids` supports up to 128 token ids. Given: 129"),
    ({"truncate": 1024}, 422, "`truncate` must be at most 1023. Given: 1024"),
    ({"temperature": "hot"}, 422, "`parameters.temperature`"),
    ({"top_p_reset_ids": [-1]}, 422, "`top_p_reset_ids` must have token ids of at least 0"),
    ({"seed": 2**64}, 422, "`seed` must be"),
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
    ({"bad_words": [" "]}, 422, "`bad_words` must have words of 1 to 200 characters. Given: 0"),
    ({"bad_words": ["a" * 201]}, 422, "`bad_words` must have words of 1 to 200 characters. Given: 201"),
    ({"bad_words": ["a"] * 129}, 422, "`bad_words` supports up to 128 words. Given: 129"),
    ({"best_of": 3, "do_sample": True}, 422, "`best_of` must be at most 2. Given: 3"),
    ({"top_n_tokens": 21}, 422, "`top_n_tokens` must be at most 20. Given: 21"),
    ({"adapter_id": "a"}, 422, "`adapter_id`: there is no adapter 'a'"),
    ({"allowed_token_ids": []}, 422, "`parameters.allowed_token_ids`: List should have at least 1 item"),
    ({"allowed_token_ids": [10**6]}, 422, "`allowed_token_ids` must have token ids"),
    ({"grammar": {"type": "json_object"}}, 422, "`grammar.value` is required"),
    ({"grammar": {"type": "regex", "value": "("}}, 422, "`grammar.value` cannot be compiled: "),
    ({"max_tokens": 5}, 422, "`max_tokens` is not a field of this route"),
    ({"response_format": {"type": "json_object"}}, 422, "`response_format` is not a field of this route"),
    (
        {"stop": ["a", "b" * 1001]},
        422,
        "`stop` must have stop sequences of at most 1000 characters. Given: 1001",
    ),
    (b'{"inputs":"a","parameters":{"temperature":1e999}}', 422, "`temperature` must be"),
    (b'{"inputs":"a","parameters":{"logit_bias":{"1":NaN}}}', 422, "`logit_bias` must have values"),
    (b'{"inputs":"a","parameters":{"max_new_tokens":1' + b"0" * 5000 + b"}}", 400, "out of range"),
    ({"inputs": ""}, 422, "`inputs` cannot be empty"),
    ({"inputs": "word " * 2000}, 422, "`inputs` must have at most 1023 tokens. Given: 200"),
    ({"inputs": None}, 422, "`inputs`"),
    ({"inputs": ["a"]}, 422, "`inputs`"),
    ({"inputs": "a", "parameters": []}, 422, "`parameters`"),
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


async def test_refusals_name_the_field_and_the_limit(broker: Broker) -> None:
    """On one route; that each refuses what it cannot read shows test_routes.py."""
    async with answering(broker.url, Answer([])) as (worker, _, client):
        wrong = []
        for case, status, words in CASES:
            response = await post(client, case)
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


async def generate(
    client: httpx.AsyncClient, parameters: dict[str, Any], inputs: str = "a"
) -> httpx.Response:
    return await client.post("/generate", json={"inputs": inputs, "parameters": parameters})


NEUTRAL: dict[str, Any] = {
    "best_of": 1,
    "temperature": 1,
    "repetition_penalty": 1.0,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0,
    "typical_p": 1.0,
    "do_sample": False,
    "logit_bias": {},
    "bad_words": [],
    "min_new_tokens": 0,
    "stop_token_ids": [],
    "return_full_text": False,
    "watermark": False,
    "decoder_input_details": False,
    "top_n_tokens": 0,
}


async def test_neutral_values_and_null_are_accepted(broker: Broker) -> None:
    one = Answer(ids("a"))
    async with answering(broker.url, one) as (worker, _, client):
        absent = dict.fromkeys(
            [*NEUTRAL, "seed", "grammar", "adapter_id", "stop", "truncate", "max_new_tokens"]
        )
        for parameters in (NEUTRAL, absent, {"temperature": 0, "top_k": -1}):
            response = await generate(client, parameters)
            assert (response.status_code, response.text) == (200, '{"generated_text":"a"}')
    assert [request.sampling for request in worker.seen] == [None] * 3


async def test_odd_but_valid_inputs_are_served(broker: Broker) -> None:
    one = Answer(ids("a"))
    async with answering(broker.url, one) as (worker, _, client):
        for inputs in ("a\x00b", "\ufffd", "\u2028", "  ", "👩‍👩‍👧‍👦"):
            assert (await generate(client, {"stop": [inputs]}, inputs)).status_code == 200
        assert worker.seen[0].stopping.stop == ["a\x00b"]


async def test_every_parameter_reaches_the_worker(broker: Broker) -> None:
    own = {"frequency_penalty": 0.5, "min_new_tokens": 2, "max_new_tokens": 3, "top_n_tokens": 0}
    async with answering(broker.url, Answer(ids("a b c"))) as (worker, _, client):
        response = await generate(client, SAMPLED | OTHERS | own)
        assert response.status_code == 200, response.text
    [request] = worker.seen
    assert request.sampling == SamplingParams(**SAMPLED, **BECOME, relative_frequency_penalty=0.5)
    assert request.stopping == StoppingParams(3, 2, stop_ids=[9], ignore_eos=True)


async def test_requests_share_blocks_with_those_of_their_salt_only(broker: Broker) -> None:
    one = Answer(ids("a"))
    async with answering(broker.url, one) as (worker, _, client):
        prompt = "a " * 20
        for salt in ({}, {"cache_salt": "x"}, {"cache_salt": "y"}):
            assert (await generate(client, salt, prompt)).status_code == 200
        refused = await generate(client, {"cache_salt": ""}, prompt)
    assert [request.cache_salt for request in worker.seen] == ["", "x", "y"]
    assert len({request.block_hashes for request in worker.seen}) == 3
    assert refused.status_code == 422 and "cache_salt`" in refused.json()["error"]


async def post_tokenize(client: httpx.AsyncClient, path: str, body: Any) -> Any:
    response = await client.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
    assert response.status_code == 200, response.text
    return response.json()


async def test_offsets_are_bytes_of_the_text(broker: Broker) -> None:
    """No worker is needed. Special tokens stand for themselves; a character of several tokens is in each of
    them.
    """
    text = "Hé 🙂🙃 wörld<|im_end|> 👩‍👩‍👧 漢字\n\n" + "long é " * 1000
    async with serving(broker.url) as (_, client):
        tokens = await post_tokenize(client, "/tokenize", {"inputs": text, "parameters": {"truncate": 1}})
        assert await post_tokenize(client, "/tokenize", {"inputs": "", "parameters": None}) == []
    assert [token["id"] for token in tokens] == TOKENIZER.encode(text).ids
    content = text.encode()
    assert all(content[token["start"] : token["stop"]].decode() == token["text"] for token in tokens)
    assert tokens[0] == {"id": TOKENIZER.token_to_id("H"), "text": "H", "start": 0, "stop": 1}
    covered = {i for token in tokens for i in range(token["start"], token["stop"])}
    assert covered == set(range(len(content)))
    assert {
        "id": TOKENIZER.token_to_id("<|im_end|>"),
        "text": "<|im_end|>",
        "start": 19,
        "stop": 29,
    } in tokens


async def test_chat_tokenize_has_the_tokens_of_a_chat_request(broker: Broker) -> None:
    chat = {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hé?"}]}
    async with answering(broker.url, Answer([11])) as (worker, _, client):
        found = await post_tokenize(client, "/chat_tokenize", chat)
        await post_tokenize(client, "/v1/chat/completions", chat)
        refused = await client.post("/chat_tokenize", json={"messages": []})
        assert (refused.status_code, set(refused.json())) == (422, {"error", "error_type"})
    text = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHé?<|im_end|>\n<|im_start|>assistant\n"
    assert found["templated_text"] == text
    ids = [token["id"] for token in found["tokenize_response"]]
    assert b"".join(i.to_bytes(4, "little") for i in ids) == worker.seen[0].prompt_ids
    assert found["tokenize_response"][-1]["stop"] == len(text.encode())


@pytest.mark.parametrize(
    ("settings", "longest"),
    [({}, (1023, 1024)), ({"max_total_tokens": 50, "max_input_tokens": 20}, (20, 50))],
)
async def test_info_has_the_limits(
    broker: Broker, settings: dict[str, Any], longest: tuple[int, int]
) -> None:
    """The limits of the workers, or lower ones of settings; they stay known when the workers stop."""
    async with serving(broker.url, max_best_of=7, **settings) as (gateway, client):
        early = await client.get("/info")
        assert (early.status_code, early.json()["error_type"]) == (503, "unavailable")
        async with working(broker.url, TOKENIZER, lambda _: Answer([])):
            await ready(gateway)
        known = (await client.get("/info")).json()
    assert (known["max_input_tokens"], known["max_total_tokens"], known["max_best_of"]) == (*longest, 7)
    assert (known["model_id"], known["max_concurrent_requests"], known["max_stop_sequences"]) == (
        "smollm2",
        1024,
        4,
    )
    assert list(known) == [
        "model_id",
        "model_sha",
        "model_pipeline_tag",
        "max_concurrent_requests",
        "max_best_of",
        "max_beam_width",
        "max_stop_sequences",
        "max_input_tokens",
        "max_total_tokens",
        "validation_workers",
        "max_client_batch_size",
        "router",
        "version",
        "sha",
        "docker_label",
        "adapters",
    ]
