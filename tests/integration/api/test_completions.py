"""/v1/completions through real HTTP and a real broker, from a worker whose tokens are scripted; the model's
own sampling values, which are the defaults of requests on /v1 and of no others; what vLLM adds to OpenAI's
routes: ids of tokens, log-probabilities of prompts, allowed ids, /tokenize, /detokenize, /version, and
logits; and beam searches through every API.
"""

import asyncio
from importlib.metadata import version
from typing import Any

import httpx
import pytest

from api.protocols.protocol import FINGERPRINT
from api.requests import validate as logits_module
from common.messages.records import unpack_ids
from common.messages.request import BeamParams, Generate
from deploy.launcher.embedded_broker import Broker
from tests.integration.api.test_resume import read_frames, two_gateways
from tests.support.answers import (
    ANSWER,
    CHAT,
    CHAT_PATH,
    SEQUENCES,
    TEXTS,
    frames,
    logprobs,
    numbered,
    positions,
    post,
    scores,
    shown_tokens,
    streamed,
    tgi_frames,
)
from tests.support.broker_state import KEYS
from tests.support.fleet import scripted_worker
from tests.support.fleet.gateways import answering, nothing_left, serving
from tests.support.fleet.scripted_worker import Answer
from tests.support.tokenizer import IM_END, TOKENIZER, ids, tokenizer_with
from tests.support.waiting import wait_until

PATH = "/v1/completions"


def counts(num_prompt: int, num_new: int, num_cached: int = 0) -> dict[str, Any]:
    numbers = {"prompt_tokens": num_prompt, "completion_tokens": num_new}
    details = {"prompt_tokens_details": {"cached_tokens": num_cached}}
    return numbers | {"total_tokens": num_prompt + num_new} | details


async def choices_of(client: httpx.AsyncClient, body: dict[str, Any]) -> list[dict[str, Any]]:
    return [*(await post(client, PATH, body))["choices"]]


def repeat(request: Generate) -> Answer:
    """Answer with the prompt and the number of the choice."""
    choice = request.sampling.choice if request.sampling else 0
    words = f"{TOKENIZER.decode(unpack_ids(request.prompt_ids))} {choice}"
    return Answer(ids(words), num_cached=16 * (1 + choice))


async def test_a_prompt_of_an_encoder_decoder_model_ends_with_what_starts_the_decoder(broker: Broker) -> None:
    tokenizer = tokenizer_with(starting_ids=(0, 7))
    async with answering(broker.url, Answer(ids("x")), tokenizer=tokenizer) as (worker, _, client):
        body = {"prompt": [1, 2, 3], "truncate_prompt_tokens": 2}
        assert (await client.post(PATH, json=body)).status_code == 200
        assert unpack_ids(worker.seen[0].prompt_ids) == [2, 3, 0, 7]
        for wrong, words in (
            ({"prompt": [1] * 1022}, "must have at most 1023 tokens. Given: 1024"),
            ({"prompt": [1], "prompt_logprobs": 0}, "is not served with an encoder-decoder model"),
            ({"prompt": [1], "return_context_logits": True}, "is not served with an encoder-decoder model"),
        ):
            refused = await client.post(PATH, json=wrong)
            assert refused.status_code == 400 and words in refused.json()["error"]["message"]


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
        body = {"prompt": ["a b", "c", "d e f"], "n": 2, "best_of": 2}
        response = await client.post(PATH, json=body)
        found = frames(await streamed(client, PATH, body | {"best_of": 1}))
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
        [choice] = await choices_of(client, body | {"logprobs": 2})
        [plain] = await choices_of(client, body | {"logprobs": 0})
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


async def test_of_likely_tokens_with_one_name_the_likeliest_is_shown(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names of parts of characters are equal. By the values lm-eval sees whether a token is the likeliest."""
    likeliest = TOKENIZER.token_to_id("ð")
    monkeypatch.setattr(
        scripted_worker, "neighbours", lambda token, logprob, _: ([likeliest, token], [-0.05, logprob])
    )
    async with answering(broker.url, Answer(ids("🙂"), ends=False)) as (_, _, client):
        [choice] = await choices_of(client, {"prompt": "a", "max_tokens": 1, "logprobs": 2})
    assert choice["logprobs"]["top_logprobs"] == [{"\ufffd": pytest.approx(-0.05)}]


async def test_echo_puts_the_prompt_before_the_text(broker: Broker) -> None:
    async with answering(broker.url, Answer(ids(" b"))) as (_, _, client):
        for prompt, text in (("a é", "a é b"), (ids("a é"), "a é b")):
            [choice] = await choices_of(client, {"prompt": prompt, "echo": True})
            assert choice["text"] == text
            found = frames(await streamed(client, PATH, {"prompt": prompt, "echo": True}))
            assert [frame["choices"][0]["text"] for frame in found] == ["a é", " b", ""]


def prompt_logprobs(prompt: list[int]) -> list[float | None]:
    """Log-probabilities of a prompt, as the fake worker has them."""
    return [None, *(-0.5 * i for i in range(1, len(prompt)))]


async def test_echo_with_logprobs_includes_the_prompt(broker: Broker) -> None:
    """The same lists, streamed or not: those of the prompt's tokens, then those of the choice's own."""
    body = {"prompt": ["a é b", "c d"], "n": 2, "echo": True}
    async with answering(broker.url, Answer(ids(" x"), ends=False)) as (worker, _, client):
        whole = await post(client, PATH, body | {"max_tokens": 1, "logprobs": 2})
        found = frames(await streamed(client, PATH, body | {"max_tokens": 1, "logprobs": 2}))
        [plain] = await choices_of(client, {"prompt": "c d", "echo": True, "max_tokens": 1, "logprobs": 0})
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
        [bare] = await choices_of(client, {"prompt": "a", "echo": True, "max_tokens": 0})
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
            assert [one["text"] for one in await choices_of(client, {"prompt": "a", **body})] == [text]


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
    error = beyond.json()["error"]
    assert error["param"] == "n" and "MAX_CONCURRENT_REQUESTS is 50" in error["message"]
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


# --- what vLLM adds -----------------------------------------------------------------------------------------

IDS = {"return_token_ids": True}
CALL = 'Hm.\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
TOOLS = {"tools": [{"type": "function", "function": {"name": "f"}}]}


async def test_a_chat_has_the_ids_of_its_prompt_and_of_its_tokens(broker: Broker) -> None:
    tokens = [*ids(" é🙂 b"), IM_END]
    async with answering(broker.url, Answer(ids(" é🙂 b"))) as (worker, _, client):
        whole = await post(client, CHAT_PATH, CHAT | IDS | {"n": 2})
        chunks = frames(await streamed(client, CHAT_PATH, CHAT | IDS))
        plain = await post(client, CHAT_PATH, CHAT)
    prompt = unpack_ids(worker.seen[0].prompt_ids)
    assert whole["prompt_token_ids"] == prompt
    assert [choice["token_ids"] for choice in whole["choices"]] == [tokens, tokens]
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [prompt] + [None] * (len(chunks) - 1)
    assert [chunk["choices"][0]["token_ids"] for chunk in chunks[1:]] == [[token] for token in tokens]
    assert "prompt_token_ids" not in plain and "token_ids" not in plain["choices"][0]


async def test_every_token_of_a_call_is_in_one_chunk_ids_or_not(broker: Broker) -> None:
    body = CHAT | TOOLS | IDS
    async with answering(broker.url, Answer(ids(CALL)), tool_call_parser="hermes") as (_, _, client):
        whole = await post(client, CHAT_PATH, body)
        chunks = frames(await streamed(client, CHAT_PATH, body))
    shown = [token for chunk in chunks[1:] for token in chunk["choices"][0]["token_ids"]]
    assert shown == whole["choices"][0]["token_ids"] == [*ids(CALL), IM_END]
    assert whole["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "f"


async def test_choices_of_completions_have_the_ids_of_their_own_prompts(broker: Broker) -> None:
    prompts = {"prompt": ["a é b", "c"]}
    async with answering(broker.url, Answer(ids(" x y"), ends=False)) as (_, _, client):
        for echo in ({}, {"echo": True}):
            body = prompts | IDS | echo | {"max_tokens": 2}
            choices = await choices_of(client, body)
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
        content = (await post(client, CHAT_PATH, chat))["choices"][0]["logprobs"]["content"]
        lists = await post(client, PATH, {"prompt": "a é", "logprobs": 2, "echo": True} | more)
        plain = await post(client, CHAT_PATH, CHAT | more)
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
        [choice] = await choices_of(client, body)
        [both] = await choices_of(client, body | {"echo": True, "logprobs": 1})
        [none] = await choices_of(client, body | {"prompt_logprobs": 0})
        chat = await post(client, CHAT_PATH, CHAT | {"prompt_logprobs": 1, "n": 2, "max_tokens": 1})
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
        [choice] = await choices_of(client, body | fitted)
        assert choice["text"] == "a é b x"


TEXT = "Hé 🙂 wörld"


async def test_the_tokens_of_a_prompt_and_of_a_chat_in_vllm_s_shape(broker: Broker) -> None:
    async with answering(broker.url, Answer([11])) as (_, gateway, client):
        longest = gateway.pool.workers.limits.max_total_tokens
        bare = await post(client, "/tokenize", {"prompt": TEXT, "model": "smollm2"})
        body = {"prompt": TEXT, "return_token_strs": True, "add_special_tokens": False}
        full = await post(client, "/tokenize", body)
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
        tokens = await post(client, "/tokenize", {"prompt": text})
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

CONTEXT = {"return_context_logits": True}
GENERATION = {"return_generation_logits": True}
BOTH = CONTEXT | GENERATION
BYTES = {"accept": "text/html, application/octet-stream;q=0.9"}
LOGITS_ROUTES: list[tuple[str, dict[str, Any]]] = [
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
        choices = await choices_of(client, body)
        [only] = await choices_of(client, {"prompt": prompts[0], "max_tokens": 1} | CONTEXT)
        [echo] = await choices_of(client, {"prompt": prompts[0], "max_tokens": 0, "echo": True} | BOTH)
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
        chat = (await post(client, CHAT_PATH, CHAT | BOTH))["choices"][0]
        parameters = BOTH | {"max_new_tokens": 2}
        plain = await post(client, "/generate", {"inputs": "a b", "parameters": parameters})
        [compat] = await post(client, "/", {"inputs": "a b", "parameters": parameters})
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
        refused = [await client.post(path, json=body, headers=BYTES) for path, body in LOGITS_ROUTES]
        plain = await client.post(PATH, json={"prompt": "a"}, headers=BYTES)
    assert {(one.status_code, "base64 in JSON" in one.text) for one in refused} == {(406, True)}
    assert plain.status_code == 200


async def test_logits_that_the_broker_has_lost_are_an_error(broker: Broker) -> None:
    async with answering(broker.url, Answer(ids(" x y"))) as (worker, gateway, client):
        worker.keeps_logits = False
        for path, body in LOGITS_ROUTES:
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


# --- beam searches ------------------------------------------------------------------------------------------

BEAMS = {"beam_width": 4, "stop": ["zzz"]}
SHOWN = [" one two é🙂", " three", " four ", " five six seven"]
"""What OpenAI's routes show: the text ends before its stop string."""
FINISH = ["stop", "length", "stop", "length"]
NUM_TOKENS = sum(len(one.ids) for one in SEQUENCES)


async def test_completions_have_every_sequence_the_best_first(broker: Broker) -> None:
    fields = {"length_penalty": 0.5, "early_stopping": "never", "diversity": 2.0, "max_tokens": 9}
    body = {"prompt": ["Hi", "Oh"], "return_token_ids": True, "logprobs": 0} | BEAMS | fields
    async with answering(broker.url, ANSWER) as (worker, _, client):
        response = await client.post(PATH, json=body)
    assert response.status_code == 200, response.text
    choices = response.json()["choices"]
    assert [choice["index"] for choice in choices] == [*range(8)]
    assert [choice["text"] for choice in choices] == SHOWN * 2
    assert [choice["finish_reason"] for choice in choices] == FINISH * 2
    assert [choice["token_ids"] for choice in choices[:4]] == [one.ids for one in SEQUENCES]
    assert choices[1]["logprobs"]["token_logprobs"] == SEQUENCES[1].logprobs
    for i, choice in enumerate(choices):
        assert choice.items() >= scores(i % 4).items()
    assert response.json()["usage"]["completion_tokens"] == 2 * NUM_TOKENS
    assert response.headers["x-generated-tokens"] == str(2 * NUM_TOKENS)
    assert [request.beams for request in worker.seen] == [BeamParams(4, 0.5, 2, 2.0, 4)] * 2
    assert worker.seen[0].sampling is None and worker.seen[0].stopping.max_new_tokens == 9


async def test_n_of_the_sequences_are_returned(broker: Broker) -> None:
    async with answering(broker.url, ANSWER) as (worker, _, client):
        for fields in ({"beam_width": 4}, {"use_beam_search": True, "best_of": 4}):
            body = CHAT | {"n": 2, "stop": "zzz"} | fields
            chat = await post(client, CHAT_PATH, body)
            assert [one["message"]["content"] for one in chat["choices"]] == SHOWN[:2]
            assert chat["usage"]["completion_tokens"] == sum(len(one.ids) for one in SEQUENCES[:2])
        await client.post(CHAT_PATH, json=CHAT | {"use_beam_search": True, "n": 3})
    assert [request.beams for request in worker.seen] == [
        BeamParams(4, num_returned=2),
        BeamParams(4, num_returned=2),
        BeamParams(3, num_returned=3),
    ]


async def test_a_search_of_one_sequence_is_greedy(broker: Broker) -> None:
    async with answering(broker.url, Answer(SEQUENCES[1].ids)) as (worker, _, client):
        answer = await post(client, PATH, {"prompt": "Hi", "use_beam_search": True})
    assert [one["text"] for one in answer["choices"]] == [TEXTS[1]]
    assert worker.seen[0].beams is None and worker.seen[0].sampling is None


async def test_generate_has_the_best_text_and_the_others_in_its_details(broker: Broker) -> None:
    parameters = BEAMS | {"details": True, "return_full_text": True}
    async with answering(broker.url, ANSWER) as (_, _, client):
        response = await client.post("/generate", json={"inputs": "Hi", "parameters": parameters})
        plain = await client.post("/generate", json={"inputs": "Hi", "parameters": BEAMS})
    assert plain.json()["generated_text"] == TEXTS[0]
    shown = plain.json()["details"]["best_of_sequences"]
    assert [one["generated_text"] for one in shown] == [*TEXTS[1:]], "also where nobody asks for details"
    found = response.json()
    assert found["generated_text"] == f"Hi{TEXTS[0]}"
    best, others = found["details"], found["details"].pop("best_of_sequences")
    assert [one["generated_text"] for one in others] == [f"Hi{text}" for text in TEXTS[1:]]
    for i, details in enumerate([best, *others]):
        assert details.items() >= scores(i).items()
        assert details["finish_reason"] == SEQUENCES[i].reason and details["seed"] is None
        assert details["generated_tokens"] == len(SEQUENCES[i].ids)
        without_text = [{**token, "text": None} for token in details["tokens"]]
        assert without_text == [{**token, "text": None} for token in shown_tokens(i)]
    assert response.headers["x-generated-tokens"] == str(NUM_TOKENS)


async def test_a_stream_has_one_chunk_for_each_choice(broker: Broker) -> None:
    usage = {"stream_options": {"include_usage": True}}
    async with answering(broker.url, ANSWER) as (_, _, client):
        *chunks, last = frames(await streamed(client, PATH, {"prompt": "Hi"} | BEAMS | usage))
        chat = frames(await streamed(client, CHAT_PATH, CHAT | BEAMS))
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert [choice["text"] for choice in choices] == SHOWN
    assert [choice["finish_reason"] for choice in choices] == FINISH
    assert all(choice.items() >= scores(i).items() for i, choice in enumerate(choices))
    assert last["usage"]["completion_tokens"] == NUM_TOKENS
    deltas = [chunk["choices"][0] for chunk in chat]
    assert [one["delta"] for one in deltas[:4]] == [{"role": "assistant", "content": ""}] * 4
    assert [(one["index"], one["delta"]["content"]) for one in deltas[4:]] == [*enumerate(SHOWN)]
    assert "beam_score" not in deltas[0] and deltas[4]["beam_score"] == SEQUENCES[0].score


async def test_generate_stream_has_one_event_for_each_sequence(broker: Broker) -> None:
    body = {"inputs": "Hi", "parameters": BEAMS | {"details": True}}
    async with answering(broker.url, ANSWER) as (_, _, client):
        events = tgi_frames(await streamed(client, "/generate_stream", body))
    assert [event["index"] for event in events] == [1, 2, 3, 4]
    assert [event["generated_text"] for event in events] == [*TEXTS]
    for i, event in enumerate(events):
        assert event["token"]["id"] == SEQUENCES[i].ids[-1]
        assert event["details"].items() >= scores(i).items()
        assert [token["id"] for token in event["details"]["tokens"]] == SEQUENCES[i].ids
        assert event["details"]["input_length"] == 1


async def test_a_search_may_find_fewer_sequences_than_were_asked_for(broker: Broker) -> None:
    """As with a grammar of two texts."""
    prompts, usage = {"prompt": ["Hi", "Oh"]} | BEAMS, {"stream_options": {"include_usage": True}}
    tgi = {"inputs": "Hi", "parameters": BEAMS | {"details": True}}
    async with answering(broker.url, Answer([], beams=SEQUENCES[:2])) as (_, _, client):
        whole = await post(client, PATH, prompts)
        chunks = frames(await streamed(client, PATH, prompts | usage))
        chat = frames(await streamed(client, CHAT_PATH, CHAT | BEAMS))
        found = await post(client, "/generate", tgi)
        events = tgi_frames(await streamed(client, "/generate_stream", tgi))
    assert [(one["index"], one["text"]) for one in whole["choices"]] == [
        *zip((0, 1, 4, 5), SHOWN[:2] * 2, strict=True)
    ]
    assert sorted(one["index"] for chunk in chunks for one in chunk["choices"]) == [0, 1, 4, 5]
    assert chunks[-1]["usage"] == whole["usage"]
    assert [one["choices"][0]["index"] for one in chat] == [0, 1, 0, 1]
    assert len(found["details"]["best_of_sequences"]) == 1
    assert [event["generated_text"] for event in events] == [*TEXTS[:2]]


async def test_another_gateway_goes_on_with_the_next_sequence(broker: Broker) -> None:
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/generate_stream", {"inputs": "Hi", "parameters": BEAMS | {"details": True}}),
        (PATH, {"prompt": ["Hi", "Oh"], "stream": True} | BEAMS),
        (CHAT_PATH, CHAT | {"stream": True} | BEAMS),
    ]
    async with two_gateways(broker.url, ANSWER) as (worker, _, client, other):
        for path, body in bodies:
            first, place = await read_frames(client, path, body | {"resume_s": 600}, 2)
            rest, _ = await read_frames(other, place, None, last_id=2)
            whole, _ = await read_frames(client, place, None)
            assert first + rest == whole and len(numbered(whole)) >= 4
            state = (await other.get(place.removesuffix("/stream"))).json()
            assert state["state"] == "finished"
            tokens = [choice["generated_tokens"] for choice in state["choices"]]
            assert tokens[:4] == [len(one.ids) for one in SEQUENCES]
    assert len(worker.seen) == 4


async def test_a_model_s_own_defaults_do_not_forbid_a_search(broker: Broker) -> None:
    defaults = {"temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.5}
    async with answering(broker.url, ANSWER) as (worker, gateway, client):
        gateway.pool.tokenizer = tokenizer_with(sampling_defaults=defaults)
        response = await client.post(PATH, json={"prompt": "Hi"} | BEAMS)
    assert response.status_code == 200, response.text
    sampling = worker.seen[0].sampling
    assert sampling is not None and (sampling.temperature, sampling.top_p) == (0.0, 1.0)
    assert sampling.repetition_penalty == 1.5


async def test_what_means_nothing_without_a_search_may_have_its_default(broker: Broker) -> None:
    neutral = {"length_penalty": 1.0, "early_stopping": False, "diversity": 0}
    async with answering(broker.url, Answer(ids(" one"))) as (worker, _, client):
        vllm = await client.post(PATH, json={"prompt": "Hi", "use_beam_search": False} | neutral)
        tgi = await client.post("/generate", json={"inputs": "Hi", "parameters": neutral})
    assert (vllm.status_code, tgi.status_code) == (200, 200)
    assert [request.beams for request in worker.seen] == [None, None]


async def test_a_search_is_by_default_as_long_as_a_cache_holds(broker: Broker) -> None:
    async with answering(broker.url, ANSWER) as (worker, _, client):
        await client.post("/generate", json={"inputs": "Hi", "parameters": {"beam_width": 4}})
        await client.post(
            "/generate", json={"inputs": "Hi", "parameters": {"beam_width": 4, "max_new_tokens": 255}}
        )
    assert [request.stopping.max_new_tokens for request in worker.seen] == [256, 255]


async def test_a_batch_may_be_smaller_than_a_search(broker: Broker) -> None:
    async with answering(broker.url, ANSWER, max_batch_size=3) as (_, _, client):
        response = await client.post("/generate", json={"inputs": "Hi", "parameters": {"beam_width": 4}})
        info = (await client.get("/info")).json()
    assert "`beam_width` must be at least 1 and at most 3 (MAX_BATCH_SIZE). Given: 4" in response.text
    assert info["max_beam_width"] == 3
