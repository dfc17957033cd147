"""Logits in answers: their rows, as base64; what is refused, lost and left behind."""

from dataclasses import replace
from typing import Any

import pytest

from api.requests import validate as logits_module
from common.broker.keys import Keys
from deploy.launcher.embedded_broker import Broker
from tests.support.answers import CHAT, CHAT_PATH, positions
from tests.support.fleet.gateways import answering, nothing_left
from tests.support.fleet.scripted_worker import Answer
from tests.support.tokenizer import IM_END, ids
from tests.support.waiting import wait_until

KEYS = Keys("default")
PATH = "/v1/completions"
CONTEXT = {"return_context_logits": True}
GENERATION = {"return_generation_logits": True}
BOTH = CONTEXT | GENERATION
BEST, RAW = {"best_of": 2, "do_sample": True}, {"logprobs_mode": "raw_logits"}
BYTES = {"accept": "text/html, application/octet-stream;q=0.9"}
ROUTES: list[tuple[str, dict[str, Any]]] = [
    (PATH, {"prompt": "a b"} | GENERATION),
    (CHAT_PATH, CHAT | GENERATION),
    ("/generate", {"inputs": "a b", "parameters": GENERATION}),
]


async def test_each_choice_has_the_logits_of_its_tokens(broker: Broker) -> None:
    """The first choice of a prompt has those of the prompt, too."""
    prompts = [ids("a é b"), ids("c")]
    tokens = len(ids(" x y"))
    body = {"prompt": prompts, "n": 2, "max_tokens": tokens, "temperature": 1, **BOTH}
    async with answering(broker.url, Answer(ids(" x y"), ends=False)) as (worker, gateway, client):
        choices = (await client.post(PATH, json=body)).json()["choices"]
        [only] = (await client.post(PATH, json={"prompt": prompts[0], "max_tokens": 1} | CONTEXT)).json()[
            "choices"
        ]
        [echo] = (
            await client.post(PATH, json={"prompt": prompts[0], "max_tokens": 0, "echo": True} | BOTH)
        ).json()["choices"]
        await nothing_left(gateway, worker)
        assert not [key async for key in worker.redis.scan_iter(KEYS.logits("*"))]
    for i, choice in enumerate(choices):
        length = len(prompts[i // 2])
        assert positions(choice["generation_logits"]) == [*range(length - 1, length - 1 + tokens)]
        assert ("context_logits" in choice) == (i % 2 == 0)
    assert [positions(choice["context_logits"]) for choice in choices[::2]] == [
        [*range(len(prompt))] for prompt in prompts
    ]
    assert "generation_logits" not in only and positions(only["context_logits"]) == [*range(len(prompts[0]))]
    assert positions(echo["generation_logits"]) == [] and len(positions(echo["context_logits"])) == len(
        prompts[0]
    )
    assert not any(request.block_hashes for request in worker.seen)


async def test_other_routes_have_them_beside_the_text(broker: Broker) -> None:
    async with answering(broker.url, Answer(ids(" x y"))) as (worker, _, client):
        chat = (await client.post(CHAT_PATH, json=CHAT | BOTH)).json()["choices"][0]
        parameters = BOTH | {"max_new_tokens": 2}
        plain = (await client.post("/generate", json={"inputs": "a b", "parameters": parameters})).json()
        [compat] = (await client.post("/", json={"inputs": "a b", "parameters": parameters})).json()
    length = worker.seen[0].num_prompt
    assert positions(chat["context_logits"]) == [*range(length)]
    assert len(positions(chat["generation_logits"])) == len([*ids(" x y"), IM_END])
    assert plain["generated_text"] == " x y" and plain | {"generated_text": ""} == compat | {
        "generated_text": ""
    }
    assert positions(plain["generation_logits"]) == [len(ids("a b")) - 1, len(ids("a b"))]


async def test_a_client_that_wants_bytes_alone_is_refused(broker: Broker) -> None:
    """Without logits the header means nothing."""
    async with answering(broker.url, Answer(ids(" x y"))) as (_, _, client):
        refused = [await client.post(path, json=body, headers=BYTES) for path, body in ROUTES]
        plain = await client.post(PATH, json={"prompt": "a"}, headers=BYTES)
    assert {(one.status_code, "base64 in JSON" in one.text) for one in refused} == {(406, True)}
    assert plain.status_code == 200


async def test_logits_that_the_broker_has_lost_are_an_error(broker: Broker) -> None:
    async with answering(broker.url, Answer(ids(" x y"))) as (worker, gateway, client):
        worker.keeps_logits = False
        for path, body in ROUTES:
            answer = await client.post(path, json=body)
            assert answer.status_code in (424, 500) and "its logits cannot be read" in answer.text
        await nothing_left(gateway, worker)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (PATH, {"prompt": "a", "stream": True} | CONTEXT, "`return_context_logits` must be false when tokens"),
    (CHAT_PATH, CHAT | {"stream": True} | GENERATION, "`return_generation_logits` must be false when"),
    ("/generate_stream", {"inputs": "a", "parameters": GENERATION}, "must be false when tokens are streamed"),
    ("/generate", {"inputs": "a", "parameters": BEST | CONTEXT}, "`best_of` must be 1"),
    ("/generate", {"inputs": "a", "parameters": BEST | RAW}, "`logprobs_mode` must not be logits"),
    ("/vertex", {"instances": [{"inputs": "a", "parameters": CONTEXT}]}, "is not a field of this route"),
    ("/v1/responses", {"input": "a"} | GENERATION, "`return_generation_logits` is not a field of this"),
    (PATH, {"prompt": "a", "logits_dtype": "model"}, "`logits_dtype` needs `return_context_logits` or"),
    (PATH, {"prompt": "a", "logits_dtype": "int8"} | BOTH, "Input should be 'float32' or 'model'"),
    (PATH, {"prompt": "a", "logprobs_mode": "raw"}, "`logprobs_mode`: Input should be 'raw_logprobs'"),
    (
        PATH,
        {"prompt": [[1, 2], [1, 2]], "max_tokens": 6, "n": 2} | BOTH,
        "`return_context_logits` and `return_generation_logits` may take at most 500 bytes"
        ". Given: 520 bytes, for 26 tokens with 5 logits of float32 each",
    ),
]


async def test_what_cannot_be_returned_is_refused_by_name(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logits_module, "MAX_LOGITS_BYTES", 500)
    async with answering(broker.url, Answer([4])) as (worker, _, client):
        for path, body, words in REFUSED:
            answer = await client.post(path, json=body)
            assert answer.status_code in (400, 422) and words in answer.text, (path, answer.text)
        fits = {"prompt": [[1, 2], [1, 2]], "max_tokens": 5, "n": 2} | BOTH
        assert (await client.post(PATH, json=fits)).status_code == 200
    assert len(worker.seen) == 4


async def test_log_probabilities_are_of_the_mode_that_is_asked_for(broker: Broker) -> None:
    """By the request, else by LOGPROBS_MODE on /v1; TGI's are of what is sampled from."""
    mode = {"logprobs_mode": "processed_logits"}
    async with answering(broker.url, Answer([4])) as (worker, gateway, client):
        defaults = {"logprobs_mode": "raw_logits"}
        gateway.pool.tokenizer = replace(gateway.pool.tokenizer, sampling_defaults=defaults)
        for more in ({}, mode, {"logprobs_mode": "raw_logprobs"}):
            await client.post(PATH, json={"prompt": "a", "temperature": 0.5} | more)
        await client.post(PATH, json={"prompt": "a", "temperature": 0})
        for more in ({}, mode):
            await client.post("/generate", json={"inputs": "a", "parameters": {"temperature": 0.5} | more})
        await client.post("/v1/responses", json={"input": "a", "store": False, "temperature": 0.5} | mode)
        await wait_until(lambda: len(worker.seen) == 7)
    samplings = [request.sampling for request in worker.seen]
    assert [(one.raw_logprobs, one.report_logits) for one in samplings if one] == [
        *[(True, True), (False, True), (True, False), (True, True)],
        *[(False, False), (False, True), (False, True)],
    ]
