"""TGI's routes: /generate, /generate_stream, /, /invocations and /vertex, /tokenize and /info, and what
reaches the worker; KServe's: …/infer with TGI's bytes and with the protocol's texts, …/generate and
…/generate_stream, health and metadata. What all routes keep to shows test_routes.py, what is refused
test_refusals.py.
"""

import json
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from api.answers.answer import HttpAnswer, Rendering
from api.http.sse import Feed
from api.protocols.tgi import TextRenderer
from api.streams.stream import Stream
from common.messages.events import Tokens
from common.messages.records import pack_floats, pack_ids, unpack_floats, unpack_ids
from common.messages.request import Generate, SamplingParams, StoppingParams
from deploy.launcher.embedded_broker import Broker
from tests.integration.api.test_chat import BECOME, OTHERS, SAMPLED
from tests.support.answers import CHAT, data_of, frames, logprobs, post, streamed, tgi_frames
from tests.support.fleet.batchers import batching
from tests.support.fleet.gateways import answering, nothing_left, ready, serving
from tests.support.fleet.scripted_worker import EOS, Answer, working
from tests.support.tokenizer import IM_END, TOKENIZER, ids, model_tokenizer, tokenizer_with


def bodies_of(stream: Stream) -> Feed:
    answer = HttpAnswer(
        "r", "/generate_stream", True, 0, "m", "f", 1, [b""], [stream.request], [""], Rendering()
    )
    feed = TextRenderer(answer, [stream]).chunks()
    assert feed is not None
    return feed


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
        whole = await post(client, "/generate", body)
        shown = tgi_frames((await client.post("/generate_stream", json=body)).content)
    tokens = [described(token_id, -0.1 - i / 7) for i, token_id in enumerate([*ids("one two"), EOS])]
    tops = [[token, described(token["id"] + 1, token["logprob"] - 1)] for token in tokens]
    about = {"finish_reason": "eos_token", "generated_tokens": 3, "seed": 7}
    assert whole == {
        "generated_text": "one two",
        "details": about | {"prefill": [], "tokens": tokens, "top_tokens": tops},
    }
    assert [frame["top_tokens"] for frame in shown] == tops
    assert list(shown[0]) == ["index", "token", "top_tokens", "generated_text", "details"]
    assert shown[-1]["details"] == about | {"input_length": 1}


async def test_decoder_input_details_are_in_the_answer(broker: Broker) -> None:
    """Ids and log-probabilities of the prompt; the first token has no log-probability. `details` need not be
    set.
    """
    common = {"do_sample": True, "top_n_tokens": 2, "decoder_input_details": True}
    prompt = ids("one two three")
    texts = ["one", " two", " three"]
    prefill = [{"id": prompt[i], "text": texts[i], "logprob": -0.5 * i if i else None} for i in range(3)]
    async with answering(broker.url, Answer(ids(" x"))) as (worker, _, client):

        async def generate(inputs: str, path: str = "/generate", **parameters: Any) -> Any:
            return await post(client, path, {"inputs": inputs, "parameters": common | parameters})

        answer = await generate("one two three")
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


@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
async def test_details_have_a_seed_if_tokens_were_sampled(broker: Broker, path: str) -> None:
    async def seed(client: httpx.AsyncClient, parameters: dict[str, Any]) -> Any:
        response = await client.post(
            path, json={"inputs": "Hi", "parameters": {"details": True} | parameters}
        )
        answer = tgi_frames(response.content)[-1] if path == "/generate_stream" else response.json()
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
    [other] = answer["details"]["best_of_sequences"]
    assert {"prefill", "tokens"} <= {*answer["details"]} and {"prefill", "tokens"} <= {*other}
    assert (other["generated_text"], other["generated_tokens"]) == ("Hione two three", 4)
    assert [request.sampling.seed for request in worker.seen] == [other["seed"], answer["details"]["seed"]]  # type: ignore[union-attr]
    assert [request.sampling.choice for request in worker.seen] == [0, 0] and other["seed"] != answer[  # type: ignore[union-attr]
        "details"
    ]["seed"]
    assert [request.request_id for request in worker.seen] == [
        f"{response.headers['x-request-id']}.{i}" for i in (0, 1)
    ]
    assert response.headers["x-generated-tokens"] == "2"


async def test_post_to_the_root_returns_an_array_or_a_stream(broker: Broker) -> None:
    """The text begins with the prompt unless `return_full_text` is false."""
    async with answering(broker.url, Answer(ids(" one"))) as (_, _, client):

        async def text(**fields: Any) -> Any:
            return await post(client, "/", {"inputs": "Hi"} | fields)

        assert await text() == [{"generated_text": "Hi one"}]
        assert await text(stream=None, parameters={"return_full_text": None}) == [
            {"generated_text": "Hi one"}
        ]
        assert await text(parameters={"return_full_text": False}) == [{"generated_text": " one"}]
        streamed = await client.post("/", json={"inputs": "Hi", "stream": True})
        assert streamed.headers["content-type"] == "text/event-stream"
        assert [frame["generated_text"] for frame in tgi_frames(streamed.content)] == [None, "Hi one"]
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
        whole = await post(client, "/generate", body)
        last = tgi_frames((await client.post("/generate_stream", json=body)).content)[-1]
    assert (whole["generated_text"], whole["details"]["finish_reason"]) == ("one two", "stop_sequence")
    assert (last["generated_text"], last["details"]["finish_reason"], last["token"]["id"]) == (
        "one two",
        "stop_sequence",
        two,
    )


async def test_a_stream_has_exactly_tgis_bytes(broker: Broker) -> None:
    answer, body = Answer(ids(" é🙂")), {"inputs": "Hi", "parameters": {"max_new_tokens": 9, "details": True}}
    expected_ids = [*answer.ids, IM_END]
    async with answering(broker.url, answer, compute_type="cpu") as (worker, _, client):
        response = await client.post("/generate_stream", json=body)
    assert worker.seen[0].stopping.max_new_tokens == 9
    assert response.headers.items() >= {
        ("content-type", "text/event-stream"),
        ("cache-control", "no-cache"),
        ("x-accel-buffering", "no"),
        ("x-compute-type", "cpu"),
        ("x-compute-characters", "2"),
    }
    whole = [
        {"id": token_id, "text": text, "logprob": logprob, "special": token_id == IM_END}
        for token_id, text, logprob in zip(
            expected_ids, (" é", "", "🙂", "<|im_end|>"), logprobs(len(expected_ids)), strict=True
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
    assert response.content == expected.encode()


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


async def test_frames_are_json_whatever_a_token_holds() -> None:
    text = "".join(map(chr, range(0x100))) + "\u2028\ufffd🙂"
    floats = unpack_floats(pack_floats([-1e-9, -3e-5, -20.5, float("-inf"), float("nan")]))
    one = Stream(Generate("r", "", pack_ids([1]), StoppingParams(9)), model_tokenizer())
    one.add_event(Tokens("r", 1, 0, pack_ids(ids("a") * 5), pack_floats(floats), [text] * 5))
    shown = await anext(bodies_of(one))
    assert [json.loads(body)["token"]["logprob"] for body in shown] == [*floats[:3], None, None]
    assert all(json.dumps(text, ensure_ascii=False).encode() in body for body in shown)


INVOCATIONS = "/invocations"


async def test_each_body_is_answered_as_by_its_route(broker: Broker) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "/": {"inputs": "Hi"},
        "/v1/chat/completions": CHAT,
        "/v1/completions": {"prompt": "Hi"},
    }
    async with answering(broker.url, Answer(ids("one two"))) as (worker, gateway, client):

        async def answer(path: str, body: dict[str, Any]) -> Any:
            found = await post(client, path, body)
            return found if isinstance(found, list) else found["choices"]

        for path, body in bodies.items():
            assert await answer(INVOCATIONS, body) == await answer(path, body)
        chunks = frames(await streamed(client, INVOCATIONS, CHAT))
        assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == "one two"
        assert data_of(await streamed(client, INVOCATIONS, {"inputs": "Hi", "parameters": {"stream": True}}))
        wrong = await client.post(INVOCATIONS, json={"prompt": ""})
        empty = await client.post(INVOCATIONS, json={})
        await nothing_left(gateway, worker)
    assert (wrong.status_code, wrong.json()["error_type"]) == (422, "validation")
    assert (empty.status_code, "`inputs`" in empty.json()["error"]) == (422, True)


VERTEX = "/vertex"


def repeat(request: Generate) -> Answer:
    """The end of the prompt."""
    words = str(TOKENIZER.decode(unpack_ids(request.prompt_ids))).split()
    return Answer(ids(f"about {words[-1]}"))


async def test_each_instance_has_its_prediction(broker: Broker) -> None:
    instances: list[dict[str, Any]] = [
        {"inputs": "one two"},
        CHAT | {"max_tokens": 3},
        {"inputs": "three", "parameters": {"max_new_tokens": 1, "seed": 7}},
        {"inputs": "four", "parameters": {"do_sample": False}},
    ]
    async with answering(broker.url, repeat) as (worker, gateway, client):
        answer = await client.post(VERTEX, json={"instances": instances})
        await nothing_left(gateway, worker)
    assert answer.status_code == 200, answer.text
    assert answer.json() == {"predictions": ["about two", "about assistant", "about", "about four"]}
    assert answer.headers["x-generated-tokens"] == str(3 + 3 + 1 + 3)
    drawn = {one.request_id[-1]: one.sampling for one in worker.seen}
    assert [drawn[i] is not None for i in "0123"] == [True, True, True, False]
    assert drawn["2"] is not None and (drawn["2"].seed, drawn["2"].temperature) == (7, 1.0)


async def test_vertex_ai_is_answered_at_the_paths_that_it_asks(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path that has a route of its own keeps it."""
    place, body = "/v1/endpoints/1/deployedModels/2", {"instances": [{"inputs": "one"}]}
    monkeypatch.setenv("AIP_PREDICT_ROUTE", f"{place}:predict")
    monkeypatch.setenv("AIP_HEALTH_ROUTE", place)
    async with answering(broker.url, repeat) as (_, _, client):
        answer = await post(client, f"{place}:predict", body)
        health = await client.get(place)
        refused = await client.post(f"{place}:predict", json={})
    assert answer == {"predictions": ["about one"]}
    assert (health.status_code, health.json()["error_type"]) == (503, "healthcheck"), "no batcher runs"
    assert (refused.status_code, refused.json()["error_type"]) == (422, "validation")
    monkeypatch.setenv("AIP_PREDICT_ROUTE", "/generate")
    monkeypatch.setenv("AIP_HEALTH_ROUTE", "/v1/models")
    async with answering(broker.url, repeat) as (_, _, client):
        assert await post(client, "/generate", {"inputs": "one"}) == {"generated_text": "about one"}
        assert (await client.get("/v1/models")).json()["object"] == "list"


# --- tgi requests -------------------------------------------------------------------------------------------


async def test_settings_lower_the_limits(broker: Broker) -> None:
    settings: dict[str, Any] = {
        "max_total_tokens": 20,
        "max_input_tokens": 3,
        "max_stop_sequences": 1,
        "max_best_of": 1,
        "max_top_n_tokens": 0,
    }
    async with answering(broker.url, Answer([]), **settings) as (_, _, client):
        assert "at most 3 tokens. Given: 4" in (await generate(client, {}, "one two three four")).text
        for parameters, words in (
            ({"max_new_tokens": 20}, "at most 20. Given: 1"),
            ({"stop": ["a", "b"]}, "up to 1 stop"),
            ({"best_of": 2, "do_sample": True}, "`best_of` must be at most 1"),
            ({"top_n_tokens": 1}, "`top_n_tokens` must be at most 0"),
        ):
            assert words in (await generate(client, parameters)).text


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
    "stream": False,
    "decoder_input_details": False,
    "top_n_tokens": 0,
}


async def test_neutral_values_and_null_are_accepted(broker: Broker) -> None:
    one = Answer(ids("a"))
    own = ("seed", "grammar", "adapter_id", "stop", "truncate", "max_new_tokens")
    async with answering(broker.url, one) as (worker, _, client):
        alone = {"seed": 3, "top_p_min": 0.5, "top_p_reset_ids": [1]}  # mean nothing where none is drawn
        greedy = {"temperature": 0, "top_k": 5, "top_p": 0.5, "min_p": 0.1} | alone
        absent = dict.fromkeys([*NEUTRAL, *own])
        for parameters in (NEUTRAL, absent, {"temperature": 0, "top_k": -1}, alone, greedy):
            response = await generate(client, parameters)
            assert (response.status_code, response.text) == (200, '{"generated_text":"a"}')
        assert [request.sampling for request in worker.seen] == [None] * 5
        await generate(client, greedy | {"bad_words": ["dog"]})
        assert worker.seen[-1].sampling == SamplingParams(bad_words=BECOME["bad_words"])


async def test_each_sampling_parameter_alone_turns_sampling_on_with_a_seed_of_its_own(broker: Broker) -> None:
    drawing: list[dict[str, Any]] = [
        {"do_sample": True},
        {"temperature": 0.9},
        {"top_p": 0.5},
        {"typical_p": 0.9},
    ]
    async with answering(broker.url, Answer(ids("a"))) as (worker, _, client):
        for parameters in drawing * 2:
            await generate(client, parameters)
        drawn = [request.sampling for request in worker.seen if request.sampling is not None]
        assert [one.temperature for one in drawn] == [1.0, 0.9, 1.0, 1.0] * 2
        assert len({one.seed for one in drawn if 0 <= one.seed < 2**63}) == 8
        await generate(client, {"top_k": 10**9, "logit_bias": {"5": 0.0, "6": -1.5}, "seed": 7})
        size = model_tokenizer().size
        biased = SamplingParams(temperature=1.0, top_k=size, logit_bias=[(6, -1.5)], seed=7)
        assert worker.seen[-1].sampling == biased, "those that change nothing are left out"


async def test_a_truncated_text_keeps_the_special_tokens_before_it(broker: Broker) -> None:
    """As in TGI's worker; the answer shows them no more than without `truncate`."""
    text, first = "one two three", "<|im_start|>"
    backend = Tokenizer.from_str(TOKENIZER.to_str())
    special = [(first, TOKENIZER.token_to_id(first))]
    backend.post_processor = TemplateProcessing(single=f"{first} $A", special_tokens=special)
    tgis: Any = PreTrainedTokenizerFast  # it is untyped
    tgis = tgis(tokenizer_object=backend, truncation_side="left")
    async with answering(broker.url, Answer(ids(" x")), tokenizer=tokenizer_with(backend=backend)) as (
        worker,
        _,
        client,
    ):
        for number, shown in (
            (1, " x"),
            (2, " three x"),
            (3, " two three x"),
            (4, f"{text} x"),
            (9, f"{text} x"),
        ):
            body = {"prompt": text, "truncate_prompt_tokens": number, "echo": True}
            assert (await post(client, "/v1/completions", body))["choices"][0]["text"] == shown
            await generate(client, {"truncate": number}, text)
            expected = tgis(text, truncation=True, max_length=number)["input_ids"]
            assert [unpack_ids(one.prompt_ids) for one in worker.seen[-2:]] == [expected] * 2


async def test_odd_but_valid_inputs_are_served(broker: Broker) -> None:
    one = Answer(ids("a"))
    async with answering(broker.url, one) as (worker, _, client):
        for inputs in ("a\x00b", "\ufffd", "\u2028", "  ", "👩‍👩‍👧‍👦"):
            assert (await generate(client, {"stop": [inputs]}, inputs)).status_code == 200
        assert worker.seen[0].stopping.stop == ["a\x00b"]


async def test_every_parameter_reaches_the_worker(broker: Broker) -> None:
    """A number without a fraction is whole."""
    own = {"frequency_penalty": 0.5, "min_new_tokens": 2.0, "max_new_tokens": 3, "stop_token_ids": [9.0]}
    async with answering(broker.url, Answer(ids("a b c"))) as (worker, _, client):
        response = await generate(client, SAMPLED | OTHERS | own)
        assert response.status_code == 200, response.text
    [request] = worker.seen
    assert request.sampling == SamplingParams(**SAMPLED, **BECOME, relative_frequency_penalty=0.5)
    assert request.stopping == StoppingParams(3, 2, stop_ids=[9], ignore_eos=True)
    assert isinstance(request.stopping.stop_ids[0], int) and isinstance(request.stopping.min_new_tokens, int)


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


async def test_offsets_are_bytes_of_the_text(broker: Broker) -> None:
    """No worker is needed. Special tokens stand for themselves; a character of several tokens is in each of
    them.
    """
    text = "Hé 🙂🙃 wörld<|im_end|> 👩‍👩‍👧 漢字\n\n" + "long é " * 1000
    async with serving(broker.url) as (_, client):
        tokens = await post(client, "/tokenize", {"inputs": text, "parameters": {"truncate": 1}})
        assert await post(client, "/tokenize", {"inputs": "", "parameters": None}) == []
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


# --- KServe -------------------------------------------------------------------------------------------------

MODEL = "/v2/models/org/some-model"
VERSIONED = f"{MODEL}/versions/7"
NAMES = {"model_name": "org/some-model", "model_version": "1"}
OWN: dict[str, Any] = {"served_model_name": ("org/some-model",)}


def repeat_about(request: Generate) -> Answer:
    """The end of the prompt."""
    words = str(TOKENIZER.decode(unpack_ids(request.prompt_ids))).split()
    return Answer(ids(f" about {words[-1]}é"))


def as_bytes(name: str, text: str) -> dict[str, Any]:
    data = [*text.encode()]
    return {"name": name, "shape": [1, len(data)], "datatype": "BYTES", "data": data}


def as_texts(name: str, *data: Any, shape: list[int] | None = None) -> dict[str, Any]:
    return {
        "name": name,
        "shape": [len(data)] if shape is None else shape,
        "datatype": "BYTES",
        "data": [*data],
    }


async def test_infer_answers_bytes_with_bytes_as_tgi_does(broker: Broker) -> None:
    body = {
        "id": "mine",
        "inputs": [as_bytes("a", "one zwei"), as_bytes("b", "drei")],
        "outputs": [{"name": "x"}, {"name": "y"}],
        "parameters": {"max_new_tokens": 20},
    }
    async with answering(broker.url, repeat_about, **OWN) as (worker, gateway, client):
        answer = await client.post(f"{VERSIONED}/infer", json=body)
        await nothing_left(gateway, worker)
    assert answer.status_code == 200, answer.text
    outputs = [as_bytes("x", " about zweié"), as_bytes("y", " about dreié")]
    assert answer.json() == {"id": "mine", "outputs": outputs}
    num_tokens = sum(len(repeat_about(one).ids) + 1 for one in worker.seen)
    assert answer.headers["x-generated-tokens"] == str(num_tokens)


async def test_infer_answers_texts_with_texts_as_the_protocol_says(broker: Broker) -> None:
    inputs = [as_texts("a", ["one", "two"], ["three", "four"], shape=[2, 2])]
    async with answering(broker.url, repeat_about, **OWN) as (_, _, client):
        answer = await client.post(f"{MODEL}/infer", json={"inputs": inputs})
        named: dict[str, Any] = {"inputs": [*inputs, as_texts("b", "five", shape=[])], "id": "4"}
        named |= {"outputs": [{"name": "x"}, {"name": "y"}], "parameters": {"return_full_text": True}}
        second = await client.post(f"{VERSIONED}/infer", json=named)
    texts = [f" about {word}é" for word in ("one", "two", "three", "four")]
    output = {"name": "text_output", "shape": [2, 2], "datatype": "BYTES", "data": texts}
    assert answer.json() == NAMES | {"outputs": [output]}
    assert second.json()["outputs"][0]["data"][0] == "one about oneé"
    last = {"name": "y", "shape": [], "datatype": "BYTES", "data": ["five about fiveé"]}
    assert second.json()["outputs"][1] == last
    assert (second.json()["id"], second.json()["model_version"]) == ("4", "7")


async def test_a_text_is_generated(broker: Broker) -> None:
    async with answering(broker.url, repeat_about, **OWN) as (worker, _, client):
        answer = await client.post(f"{MODEL}/generate", json={"text_input": "one"})
        parameters = {"details": True, "max_tokens": 2, "stop_words": ["zzz"], "random_seed": 7, "top_k": 3}
        beside = {"text_input": "one", "temperature": 0.5, "logit_bias": {"5": 1.5}}
        second = await client.post(f"{VERSIONED}/generate", json=beside | {"parameters": parameters})
        full = {"text_input": "one", "parameters": {"exclude_input_in_output": False, "stream": False}}
        third = await client.post("/v2/models/tgi/generate", json=full)
        unnamed = await client.post("/v2/models//generate", json={"text_input": "one"})
    assert answer.json() == NAMES | {"text_output": " about oneé"}
    body, details = second.json(), second.json()["details"]
    assert (body["model_version"], body["text_output"]) == ("7", " about one")
    assert (details["finish_reason"], details["generated_tokens"], details["seed"]) == ("length", 2, 7)
    assert [token["text"] for token in details["logprobs"]] == [" about", " one"]
    sampled = worker.seen[1]
    assert sampled.sampling is not None and (sampled.sampling.temperature, sampled.sampling.top_k) == (0.5, 3)
    assert sampled.stopping.stop == ["zzz"] and sampled.sampling.logit_bias == [(5, 1.5)]
    assert third.json() == {"model_name": "tgi", "model_version": "1", "text_output": "one about oneé"}
    assert unnamed.json() == answer.json() | {"model_name": ""}


async def test_the_texts_of_a_stream_add_up_to_the_whole(broker: Broker) -> None:
    words = Answer([*ids(" a bé"), EOS, *ids(" stop here")])
    body = {"text_input": "one", "parameters": {"ignore_eos": True, "stop": ["op h"], "details": True}}
    async with answering(broker.url, words, **OWN) as (_, _, client):
        whole = await post(client, f"{MODEL}/generate", body)
        plain = body | {"parameters": {"ignore_eos": True, "stop": ["op h"], "stream": True}}
        streams = [await client.post(f"{MODEL}/generate_stream", json=one) for one in (body, plain)]
    detailed, short = (tgi_frames(one.content) for one in streams)
    assert streams[0].headers["content-type"] == "text/event-stream"
    assert "".join(one["text_output"] for one in short) == whole["text_output"] == " a bé stop h"
    assert all(one.keys() == {*NAMES, "text_output"} and NAMES.items() <= one.items() for one in short)
    assert [one["details"]["token"] for one in detailed] == whole["details"]["logprobs"]
    *others, last = (one["details"]["finish_reason"] for one in detailed)
    assert last == "stop_sequence" and not any(others)
    assert detailed[-1]["details"]["generated_tokens"] == len(detailed)


async def test_metadata_has_tgis_shapes_and_the_protocols(broker: Broker) -> None:
    async with batching(broker.url), answering(broker.url, repeat_about, **OWN) as (_, _, client):
        found = {
            path: (await client.get(path)).json()
            for path in ("/v2", VERSIONED, MODEL, f"{VERSIONED}/ready", f"{MODEL}/ready", "/v2/health/ready")
        }
        missing = await client.get("/v2/models/gpt-5/ready")
        other = await client.post("/v2/models/gpt-5/generate", json={"text_input": "a"})
    assert found["/v2"]["name"] == "tokenfleet" and {"health", "models"} <= {*found["/v2"]["extensions"]}
    assert found[VERSIONED] == {
        "name": "org/some-model",
        "version": "7",
        "extensions": ["infer", "ready", "generate"],
    }
    tensors = [{"name": f"text_{kind}", "datatype": "BYTES", "shape": [-1]} for kind in ("input", "output")]
    assert found[MODEL] == {
        "name": "org/some-model",
        "versions": ["1"],
        "platform": "pytorch_transformers",
        "inputs": tensors[:1],
        "outputs": tensors[1:],
    }
    assert found[f"{VERSIONED}/ready"] == found["/v2/health/ready"] == {"live": True}
    assert found[f"{MODEL}/ready"] == {"name": "org/some-model", "ready": True}
    assert missing.status_code == 404 and "gpt-5" in missing.json()["error"]
    said = {"error": "The model `gpt-5` does not exist; served: `org/some-model`"}
    assert (other.status_code, other.json()) == (404, said)


async def test_without_a_worker_a_gateway_lives_and_is_not_ready(broker: Broker) -> None:
    async with serving(broker.url, worker_grace_s=0, **OWN) as (_, client):
        assert (await client.get("/v2/health/live")).json() == {"live": True}
        for path in ("/v2/health/ready", f"{MODEL}/ready", f"{VERSIONED}/ready"):
            answer = await client.get(path)
            assert answer.status_code == 503 and answer.json().keys() == {"error"}
