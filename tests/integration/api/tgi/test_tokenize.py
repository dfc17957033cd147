"""POST /tokenize, POST /chat_tokenize and GET /info."""

import json
from typing import Any

import httpx
import pytest

from deploy.launcher.embedded_broker import Broker
from tests.support.fleet.gateways import answering, ready, serving
from tests.support.fleet.scripted_worker import Answer, working
from tests.support.tokenizer import TOKENIZER


async def post(client: httpx.AsyncClient, path: str, body: Any) -> Any:
    response = await client.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
    assert response.status_code == 200, response.text
    return response.json()


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


async def test_chat_tokenize_has_the_tokens_of_a_chat_request(broker: Broker) -> None:
    chat = {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hé?"}]}
    async with answering(broker.url, Answer([11])) as (worker, _, client):
        found = await post(client, "/chat_tokenize", chat)
        await post(client, "/v1/chat/completions", chat)
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
