"""Beam searches through every API: whole answers, streams, what becomes of them when something fails, and
what is refused.
"""

import json
from typing import Any

from common.messages.request import BeamParams
from deploy.launcher.embedded_broker import Broker
from tests.integration.api.test_resume import read_frames, two_gateways
from tests.support.answers import (
    ANSWER,
    CHAT,
    CHAT_PATH,
    SEQUENCES,
    TEXTS,
    data_of,
    frames,
    numbered,
    scores,
    shown_tokens,
    streamed,
)
from tests.support.fleet.gateways import answering
from tests.support.fleet.scripted_worker import Answer
from tests.support.tokenizer import ids, tokenizer_with

PATH = "/v1/completions"
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
            chat = (await client.post(CHAT_PATH, json=body)).json()
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
        answer = (await client.post(PATH, json={"prompt": "Hi", "use_beam_search": True})).json()
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
    async with (
        answering(broker.url, ANSWER) as (_, _, client),
        client.stream("POST", "/generate_stream", json=body) as response,
    ):
        events = [json.loads(data) for data in data_of(await response.aread())]
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
        whole = (await client.post(PATH, json=prompts)).json()
        chunks = frames(await streamed(client, PATH, prompts | usage))
        chat = frames(await streamed(client, CHAT_PATH, CHAT | BEAMS))
        found = (await client.post("/generate", json=tgi)).json()
        async with client.stream("POST", "/generate_stream", json=tgi) as response:
            events = [json.loads(data) for data in data_of(await response.aread())]
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
