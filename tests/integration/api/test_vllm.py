"""What vLLM adds to OpenAI's routes: ids of tokens, log-probabilities of prompts, allowed ids, /tokenize and
/detokenize in its shape, and /version.

Logits in answers: their rows, as base64; what is refused, lost and left behind.
"""

from importlib.metadata import version
from typing import Any

import pytest

from api.requests import validate as logits_module
from common.broker.keys import Keys
from common.messages.records import unpack_ids
from deploy.launcher.embedded_broker import Broker
from tests.support.answers import CHAT, CHAT_PATH, frames, logprobs, positions, streamed
from tests.support.fleet.gateways import answering, nothing_left, serving
from tests.support.fleet.scripted_worker import Answer
from tests.support.tokenizer import IM_END, TOKENIZER, ids, tokenizer_with
from tests.support.waiting import wait_until

PATH = "/v1/completions"
IDS = {"return_token_ids": True}
CALL = 'Hm.\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
TOOLS = {"tools": [{"type": "function", "function": {"name": "f"}}]}


async def test_a_chat_has_the_ids_of_its_prompt_and_of_its_tokens(broker: Broker) -> None:
    tokens = [*ids(" é🙂 b"), IM_END]
    async with answering(broker.url, Answer(ids(" é🙂 b"))) as (worker, _, client):
        whole = (await client.post(CHAT_PATH, json=CHAT | IDS | {"n": 2})).json()
        chunks = frames(await streamed(client, CHAT_PATH, CHAT | IDS))
        plain = (await client.post(CHAT_PATH, json=CHAT)).json()
    prompt = unpack_ids(worker.seen[0].prompt_ids)
    assert whole["prompt_token_ids"] == prompt
    assert [choice["token_ids"] for choice in whole["choices"]] == [tokens, tokens]
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [prompt] + [None] * (len(chunks) - 1)
    assert [chunk["choices"][0]["token_ids"] for chunk in chunks[1:]] == [[token] for token in tokens]
    assert "prompt_token_ids" not in plain and "token_ids" not in plain["choices"][0]


async def test_every_token_of_a_call_is_in_one_chunk_ids_or_not(broker: Broker) -> None:
    body = CHAT | TOOLS | IDS
    async with answering(broker.url, Answer(ids(CALL)), tool_call_parser="hermes") as (_, _, client):
        whole = (await client.post(CHAT_PATH, json=body)).json()
        chunks = frames(await streamed(client, CHAT_PATH, body))
    shown = [token for chunk in chunks[1:] for token in chunk["choices"][0]["token_ids"]]
    assert shown == whole["choices"][0]["token_ids"] == [*ids(CALL), IM_END]
    assert whole["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "f"


async def test_choices_of_completions_have_the_ids_of_their_own_prompts(broker: Broker) -> None:
    prompts = {"prompt": ["a é b", "c"]}
    async with answering(broker.url, Answer(ids(" x y"), ends=False)) as (_, _, client):
        for echo in ({}, {"echo": True}):
            body = prompts | IDS | echo | {"max_tokens": 2}
            choices = (await client.post(PATH, json=body)).json()["choices"]
            assert [one["prompt_token_ids"] for one in choices] == [ids("a é b"), ids("c")]
            assert [one["token_ids"] for one in choices] == [ids(" x y")] * 2
            found = [chunk["choices"][0] for chunk in frames(await streamed(client, PATH, body))]
            for i, choice in enumerate(choices):
                own = [one for one in found if one["index"] == i]
                assert own[0]["prompt_token_ids"] == choice["prompt_token_ids"]
                assert [token for one in own for token in one["token_ids"]] == choice["token_ids"]
                assert "".join(one["text"] for one in own) == choice["text"]


async def test_tokens_are_named_by_their_ids(broker: Broker) -> None:
    """Only with `logprobs`: without them no token is named."""
    by_id = {"return_tokens_as_token_ids": True}
    tokens = ids(" é🙂")
    names = [f"token_id:{token}" for token in tokens]
    async with answering(broker.url, Answer(tokens, ends=False)) as (_, _, client):
        more = by_id | {"max_tokens": len(tokens)}
        chat = CHAT | more | {"logprobs": True, "top_logprobs": 2}
        content = (await client.post(CHAT_PATH, json=chat)).json()["choices"][0]["logprobs"]["content"]
        lists = (await client.post(PATH, json={"prompt": "a é", "logprobs": 2, "echo": True} | more)).json()
        plain = (await client.post(CHAT_PATH, json=CHAT | more)).json()
    assert [one["token"] for one in content] == names
    assert b"".join(bytes(one["bytes"]) for one in content) == " é🙂".encode()
    assert content[0]["top_logprobs"][1]["token"] == f"token_id:{tokens[0] + 1}"
    found = lists["choices"][0]["logprobs"]
    assert found["tokens"] == [f"token_id:{token}" for token in ids("a é")] + names
    assert [*found["top_logprobs"][-1]] == [names[-1], f"token_id:{tokens[-1] + 1}"]
    assert plain["choices"][0]["logprobs"] is None


async def test_prompt_logprobs_are_objects_by_token_id(broker: Broker) -> None:
    """The scripted worker's likeliest tokens are each token itself, then its neighbour."""
    prompt = ids("a é b")
    async with answering(broker.url, Answer(ids(" x"), ends=False)) as (worker, _, client):
        body: dict[str, Any] = {"prompt": "a é b", "max_tokens": 1, "prompt_logprobs": 2}
        [choice] = (await client.post(PATH, json=body)).json()["choices"]
        [both] = (await client.post(PATH, json=body | {"echo": True, "logprobs": 1})).json()["choices"]
        [none] = (await client.post(PATH, json=body | {"prompt_logprobs": 0})).json()["choices"]
        chat = (
            await client.post(CHAT_PATH, json=CHAT | {"prompt_logprobs": 1, "n": 2, "max_tokens": 1})
        ).json()
        kept = frames(await streamed(client, PATH, body | {"prompt_logprobs": 0}))
    assert [request.prompt_logprobs for request in worker.seen[:3]] == [2, 2, 0]
    first, *others = choice["prompt_logprobs"]
    assert first is None and [[*one] for one in others] == [[str(i), str(i + 1)] for i in prompt[1:]]
    own = others[0][str(prompt[1])]
    assert own == {"logprob": -0.5, "rank": 1, "decoded_token": " é"}
    assert others[0][str(prompt[1] + 1)]["rank"] == 2
    assert both["prompt_logprobs"] == choice["prompt_logprobs"] and both["text"] == "a é b x"
    assert both["logprobs"]["top_logprobs"][1] == {" é": -0.5}
    assert both["logprobs"]["token_logprobs"][-1] == logprobs(1)[0]
    unranked = none["prompt_logprobs"][1]
    assert unranked == {str(prompt[1]): {"logprob": -0.5, "rank": None, "decoded_token": " é"}}
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    assert all("prompt_logprobs" not in chunk["choices"][0] for chunk in kept)


async def test_allowed_ids_reach_the_worker(broker: Broker) -> None:
    allowed = {"allowed_token_ids": [7, 11]}
    async with answering(broker.url, Answer([7])) as (worker, _, client):
        for path, body in ((CHAT_PATH, CHAT), (PATH, {"prompt": "a"}), ("/v1/responses", {"input": "a"})):
            answer = await client.post(path, json=body | allowed | {"temperature": 0})
            assert answer.status_code == 200, answer.text
    assert [one.sampling and one.sampling.allowed_token_ids for one in worker.seen] == [[7, 11]] * 3


async def test_a_prompt_can_be_truncated_to_fit(broker: Broker) -> None:
    """It gets what `max_tokens` leaves of the context, and at most MAX_INPUT_TOKENS."""
    long = ids("a " * 2000)
    fitted = {"truncate_prompt_tokens": -1}
    async with answering(broker.url, Answer(ids(" x"))) as (worker, _, client):
        full = await client.post(PATH, json={"prompt": long, "max_tokens": 1024} | fitted)
        assert full.status_code == 400 and "must be at most 1024" in full.text
        wrong = await client.post(PATH, json={"prompt": long, "truncate_prompt_tokens": 0})
        assert wrong.status_code == 400 and "no token would be left" in wrong.text
        for most, num_tokens in [(1, 1023), (24, 1000)]:
            answer = await client.post(PATH, json={"prompt": long, "max_tokens": most} | fitted)
            assert answer.status_code == 200, answer.text
            assert unpack_ids(worker.seen[-1].prompt_ids) == long[-num_tokens:]
        chat = CHAT | fitted | {"messages": [{"role": "user", "content": "a " * 2000}], "max_tokens": 24}
        assert (await client.post(CHAT_PATH, json=chat)).status_code == 200
        assert len(unpack_ids(worker.seen[-1].prompt_ids)) == 1000
        body: dict[str, Any] = {"prompt": "a é b", "echo": True, "max_tokens": 1}
        [choice] = (await client.post(PATH, json=body | fitted)).json()["choices"]
        assert choice["text"] == "a é b x"


TEXT = "Hé 🙂 wörld"


async def test_the_tokens_of_a_prompt_and_of_a_chat_in_vllm_s_shape(broker: Broker) -> None:
    async with answering(broker.url, Answer([11])) as (_, gateway, client):
        longest = gateway.pool.workers.limits.max_total_tokens
        bare = (await client.post("/tokenize", json={"prompt": TEXT, "model": "smollm2"})).json()
        body = {"prompt": TEXT, "return_token_strs": True, "add_special_tokens": False}
        full = (await client.post("/tokenize", json=body)).json()
        chat: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
        continued = chat | {"continue_final_message": True, "add_generation_prompt": True}
        refused = await client.post("/tokenize", json=continued)
        unknown = await client.post("/tokenize", json={"prompt": TEXT, "model": "gpt-5"})
    assert bare == {
        "count": len(ids(TEXT)),
        "max_model_len": longest,
        "tokens": ids(TEXT),
        "token_strs": None,
    }
    assert full["token_strs"] == TOKENIZER.encode(TEXT, add_special_tokens=False).tokens
    assert (refused.status_code, unknown.status_code) == (422, 404)


async def test_detokenize_gives_the_text_back(broker: Broker) -> None:
    """No worker is needed; special tokens are included."""
    text = f"<|im_start|>user\n{TEXT}<|im_end|>"
    async with serving(broker.url) as (_, client):
        tokens = (await client.post("/tokenize", json={"prompt": text})).json()
        assert tokens["max_model_len"] is None
        back = await client.post("/detokenize", json={"tokens": tokens["tokens"]})
        wrong = await client.post("/detokenize", json={"tokens": [1, 10**9]})
    assert back.json() == {"prompt": text}
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "tokens")


async def test_version_and_openapi_stand_where_vllm_has_them(broker: Broker) -> None:
    async with serving(broker.url, api_key="sesame") as (_, client):
        assert (await client.get("/version")).json() == {"version": version("tokenfleet")}
        document = (await client.get("/openapi.json")).json()
        assert document == (await client.get("/api-doc/openapi.json")).json()


# --- logits -------------------------------------------------------------------------------------------------

KEYS = Keys("default")
CONTEXT = {"return_context_logits": True}
GENERATION = {"return_generation_logits": True}
BOTH = CONTEXT | GENERATION
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


async def test_logits_are_limited(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logits_module, "MAX_LOGITS_BYTES", 500)
    asked = {"prompt": [[1, 2], [1, 2]], "n": 2} | BOTH
    async with answering(broker.url, Answer([4])) as (worker, _, client):
        refused = await client.post(PATH, json=asked | {"max_tokens": 6})
        words = "may take at most 500 bytes. Given: 520 bytes, for 26 tokens with 5 logits of float32 each"
        assert refused.status_code == 400 and words in refused.text
        assert (await client.post(PATH, json=asked | {"max_tokens": 5})).status_code == 200
    assert len(worker.seen) == 4


async def test_log_probabilities_are_of_the_mode_that_is_asked_for(broker: Broker) -> None:
    """By the request, else by LOGPROBS_MODE on /v1; TGI's are of what is sampled from."""
    mode = {"logprobs_mode": "processed_logits"}
    async with answering(broker.url, Answer([4])) as (worker, gateway, client):
        defaults = {"logprobs_mode": "raw_logits"}
        gateway.pool.tokenizer = tokenizer_with(sampling_defaults=defaults)
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
