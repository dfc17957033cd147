"""Raw logits over HTTP and in jobs are those of transformers."""

import asyncio
import base64
import json
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import pytest
from redis.asyncio import Redis
from safetensors.numpy import load

from common.broker.keys import Keys
from tests.support.engine.reference import prompt_ids, reference_logits
from tests.support.fleet.http_calls import post, sampled_body
from tests.support.prompts import FEW, PROMPTS
from tests.support.waiting import wait_until

KEYS = Keys("default")
COMPLETIONS = "/v1/completions"
BOTH = {"return_context_logits": True, "return_generation_logits": True}
Floats = npt.NDArray[np.float32]


def values(found: dict[str, Any]) -> Floats:
    """The logits in a field of a JSON response."""
    assert found.keys() == {"dtype", "shape", "data"} and found["dtype"] == "float32"
    return np.frombuffer(base64.b64decode(found["data"]), "<f4").reshape(found["shape"])


def check(context: Floats | None, generation: Floats | None, prompt: list[int], ids: list[int]) -> None:
    expected = reference_logits([*prompt, *ids])
    if context is not None:
        np.testing.assert_allclose(context, expected[: len(prompt)], rtol=1e-3, atol=1e-3)
    if generation is not None:
        np.testing.assert_allclose(generation, expected[len(prompt) - 1 : -1], rtol=1e-3, atol=1e-3)


@pytest.mark.slow
async def test_logits_equal_transformers_on_every_route(http: httpx.AsyncClient, redis: Redis) -> None:
    """In a batch with others; with penalties, which raw logits do not show; as JSON, as a file, in jobs."""
    prompt = PROMPTS[FEW[-2]]
    [ids] = prompt_ids([prompt])
    others = [asyncio.create_task(post(http, "/generate", sampled_body(i))) for i in range(3)]
    penalised = {"temperature": 0.9, "seed": 3, "frequency_penalty": 1.5, "repetition_penalty": 1.3}
    body = {"prompt": [ids, ids[:5]], "max_tokens": 4, "n": 2, "return_token_ids": True, **BOTH, **penalised}
    completion = await post(http, COMPLETIONS, body)
    for i, choice in enumerate(completion["choices"]):
        assert ("context_logits" in choice) == (i % 2 == 0)
        context = values(choice["context_logits"]) if i % 2 == 0 else None
        known = (ids, ids, ids[:5], ids[:5])[i]
        check(context, values(choice["generation_logits"]), known, choice["token_ids"])

    parameters = {"max_new_tokens": 3, "details": True, "return_generation_logits": True}
    entry = await redis.xadd(KEYS.submit, {"job": json.dumps({"inputs": prompt, "parameters": parameters})})
    generated = await post(http, "/generate", {"inputs": prompt, "parameters": parameters})
    job = json.loads(await wait_until(lambda: redis.get(KEYS.result(entry.decode()))))
    for answer in (generated, job):
        new_ids = [token["id"] for token in answer["details"]["tokens"]]
        assert "context_logits" not in answer
        check(None, values(answer["generation_logits"]), ids, new_ids)
    await asyncio.gather(*others)


@pytest.mark.slow
async def test_a_client_gets_a_safetensors_file(http: httpx.AsyncClient) -> None:
    chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3, "temperature": 0}
    asked = chat | BOTH | {"return_token_ids": True}
    answer = await http.post(
        "/v1/chat/completions", json=asked, headers={"accept": "application/octet-stream"}
    )
    assert answer.status_code == 200 and answer.headers["content-type"] == "application/octet-stream"
    size = int.from_bytes(answer.content[:8], "little")
    response = json.loads(json.loads(answer.content[8 : 8 + size])["__metadata__"]["response"])
    choice, tensors = response["choices"][0], load(answer.content)
    context, generation = (
        tensors[choice[name]["tensor"]] for name in ("context_logits", "generation_logits")
    )
    assert [*context.shape] == choice["context_logits"]["shape"]
    check(context, generation, response["prompt_token_ids"], choice["token_ids"])
    plain = await post(http, "/v1/chat/completions", asked)
    assert np.array_equal(values(plain["choices"][0]["context_logits"]).shape, context.shape)
    np.testing.assert_allclose(
        values(plain["choices"][0]["generation_logits"]), generation, rtol=1e-4, atol=1e-4
    )


async def test_too_many_logits_are_refused(http: httpx.AsyncClient) -> None:
    body = {"prompt": "Hello", "max_tokens": 1000, "return_generation_logits": True}
    answer = await http.post(COMPLETIONS, json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "return_generation_logits"
    assert "67108864 bytes" in error["message"]
    assert "196608000 bytes, for 1000 tokens with 49152 logits of float32" in error["message"]
