"""KServe's routes: …/infer with TGI's bytes and with the protocol's texts, …/generate and …/generate_stream,
health and metadata, errors, keys, and answers that outlive their connection.
"""

import json
from typing import Any

from common.messages.records import unpack_ids
from common.messages.request import Generate
from deploy.launcher.embedded_broker import Broker
from tests.support.answers import data_of
from tests.support.fleet.batchers import batching
from tests.support.fleet.gateways import answering, nothing_left, serving
from tests.support.fleet.scripted_worker import EOS, Answer
from tests.support.tokenizer import TOKENIZER, ids

MODEL = "/v2/models/org/some-model"
VERSIONED = f"{MODEL}/versions/7"
NAMES = {"model_name": "org/some-model", "model_version": "1"}
OWN: dict[str, Any] = {"served_model_name": ("org/some-model",)}


def repeat(request: Generate) -> Answer:
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
    async with answering(broker.url, repeat, **OWN) as (worker, gateway, client):
        answer = await client.post(f"{VERSIONED}/infer", json=body)
        await nothing_left(gateway, worker)
    assert answer.status_code == 200, answer.text
    outputs = [as_bytes("x", " about zweié"), as_bytes("y", " about dreié")]
    assert answer.json() == {"id": "mine", "outputs": outputs}
    assert answer.headers["x-generated-tokens"] == str(sum(len(repeat(one).ids) + 1 for one in worker.seen))


async def test_infer_answers_texts_with_texts_as_the_protocol_says(broker: Broker) -> None:
    inputs = [as_texts("a", ["one", "two"], ["three", "four"], shape=[2, 2])]
    async with answering(broker.url, repeat, **OWN) as (_, _, client):
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
    async with answering(broker.url, repeat, **OWN) as (worker, _, client):
        answer = await client.post(f"{MODEL}/generate", json={"text_input": "one"})
        parameters = {"details": True, "max_tokens": 2, "stop_words": ["zzz"], "random_seed": 7, "top_k": 3}
        second = await client.post(
            f"{VERSIONED}/generate",
            json={"text_input": "one", "temperature": 0.5, "parameters": parameters},
        )
        full = {"text_input": "one", "parameters": {"exclude_input_in_output": False, "stream": False}}
        third = await client.post("/v2/models/tgi/generate", json=full)
    assert answer.json() == NAMES | {"text_output": " about oneé"}
    body, details = second.json(), second.json()["details"]
    assert (body["model_version"], body["text_output"]) == ("7", " about one")
    assert (details["finish_reason"], details["generated_tokens"], details["seed"]) == ("length", 2, 7)
    assert [token["text"] for token in details["logprobs"]] == [" about", " one"]
    sampled = worker.seen[1]
    assert sampled.sampling is not None and (sampled.sampling.temperature, sampled.sampling.top_k) == (0.5, 3)
    assert sampled.stopping.stop == ["zzz"]
    assert third.json() == {"model_name": "tgi", "model_version": "1", "text_output": "one about oneé"}


async def test_the_texts_of_a_stream_add_up_to_the_whole(broker: Broker) -> None:
    words = Answer([*ids(" a bé"), EOS, *ids(" stop here")])
    body = {"text_input": "one", "parameters": {"ignore_eos": True, "stop": ["op h"], "details": True}}
    async with answering(broker.url, words, **OWN) as (_, _, client):
        whole = (await client.post(f"{MODEL}/generate", json=body)).json()
        plain = body | {"parameters": {"ignore_eos": True, "stop": ["op h"], "stream": True}}
        streams = [await client.post(f"{MODEL}/generate_stream", json=one) for one in (body, plain)]
    detailed, short = ([json.loads(data) for data in data_of(one.content)] for one in streams)
    assert streams[0].headers["content-type"] == "text/event-stream"
    assert "".join(one["text_output"] for one in short) == whole["text_output"] == " a bé stop h"
    assert all(one.keys() == {*NAMES, "text_output"} and NAMES.items() <= one.items() for one in short)
    assert [one["details"]["token"] for one in detailed] == whole["details"]["logprobs"]
    *others, last = (one["details"]["finish_reason"] for one in detailed)
    assert last == "stop_sequence" and not any(others)
    assert detailed[-1]["details"]["generated_tokens"] == len(detailed)


async def test_errors_have_kserves_shape(broker: Broker) -> None:
    wrong: list[tuple[str, Any, int, str]] = [
        (
            "/v2/models/gpt-5/generate",
            {"text_input": "a"},
            404,
            "The model `gpt-5` does not exist; served: `org/some-model`",
        ),
        ("/v2/nothing", {}, 404, "Not Found: POST /v2/nothing"),
    ]
    async with answering(broker.url, Answer([11]), **OWN) as (worker, _, client):
        for path, body, status, words in wrong:
            answer = await client.post(path, json=body)
            assert answer.status_code == status and answer.json().keys() == {"error"}, answer.text
            assert words in answer.json()["error"], answer.text
        assert not worker.seen


async def test_metadata_has_tgis_shapes_and_the_protocols(broker: Broker) -> None:
    async with batching(broker.url), answering(broker.url, repeat, **OWN) as (_, _, client):
        found = {
            path: (await client.get(path)).json()
            for path in ("/v2", VERSIONED, MODEL, f"{VERSIONED}/ready", f"{MODEL}/ready", "/v2/health/ready")
        }
        missing = await client.get("/v2/models/gpt-5/ready")
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


async def test_without_a_worker_a_gateway_lives_and_is_not_ready(broker: Broker) -> None:
    async with serving(broker.url, worker_grace_s=0, **OWN) as (_, client):
        assert (await client.get("/v2/health/live")).json() == {"live": True}
        for path in ("/v2/health/ready", f"{MODEL}/ready", f"{VERSIONED}/ready"):
            answer = await client.get(path)
            assert answer.status_code == 503 and answer.json().keys() == {"error"}
