"""Vectors and scores as jobs over Redis: with the answers of /v1/embeddings and /v1/rerank."""

import json
from pathlib import Path
from typing import Any

import pytest

from deploy.launcher.embedded_broker import Broker
from tests.support.jobs import KEYS
from tests.support.pooling.pooling_gateway import pooling_gateway
from tests.support.pooling.tiny_encoders import save_encoder
from tests.support.waiting import wait_until


async def result(redis: Any, job_id: str) -> Any:
    await wait_until(lambda: redis.exists(KEYS.result(job_id)))
    return json.loads(await redis.get(KEYS.result(job_id)))


async def test_a_job_is_answered_as_http_answers(broker: Broker, tmp_path: Path) -> None:
    model = save_encoder(tmp_path, "BERT")
    async with pooling_gateway(broker.url, tmp_path, model) as (worker, _, client):
        job = {
            "id": "vectors",
            "input": ["hi", "The sky"],
            "parameters": {"dimensions": 4},
            "reply": "stream",
        }
        await worker.redis.xadd(KEYS.submit, {"job": json.dumps(job)})
        found = await result(worker.redis, "vectors")
        body = {"input": job["input"], "dimensions": 4}
        assert found == (await client.post("/v1/embeddings", json=body)).json()
        [(_, frame)] = await worker.redis.xrange(KEYS.reply("vectors"))
        assert json.loads(frame[b"frame"]) == found
        rank = {"query": "sky", "documents": ["hi", "The sky"]}
        await worker.redis.xadd(KEYS.submit, {"job": json.dumps({"id": "ranks", **rank})})
        answer = (await client.post("/v1/rerank", json=rank)).json()
        assert (await result(worker.redis, "ranks"))["results"] == answer["results"]


@pytest.mark.parametrize(
    "job, words",
    [
        ({"input": "hi", "parameters": {"dimensions": 99}}, "`dimensions` must be 1 to 32"),
        (
            {"input": "hi", "messages": []},
            "either `inputs` or `messages` must be given, or `prompt`, or for vectors",
        ),
        ({"query": "hi"}, "`documents`: Input should be a valid array"),
        ({"inputs": "hi"}, "is an embedding model: it generates no text"),
    ],
)
async def test_a_wrong_job_is_told_why(broker: Broker, tmp_path: Path, job: Any, words: str) -> None:
    model = save_encoder(tmp_path, "BERT")
    async with pooling_gateway(broker.url, tmp_path, model) as (worker, _, _):
        await worker.redis.xadd(KEYS.submit, {"job": json.dumps({"id": "wrong", **job})})
        assert words in json.dumps(await result(worker.redis, "wrong"))
