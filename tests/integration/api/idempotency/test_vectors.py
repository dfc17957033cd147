"""Vectors and scores that are asked for again with their `Idempotency-Key` are computed once."""

from pathlib import Path
from typing import Any

import pytest

from deploy.launcher.embedded_broker import Broker
from tests.integration.api.idempotency.test_replay import keyed
from tests.support.pooling.pooling_gateway import pooling_gateway
from tests.support.pooling.tiny_encoders import save_encoder

REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/embeddings", {"input": ["hi", "The sky"], "dimensions": 4}),
    ("/v1/embeddings", {"input": "hi", "encoding_format": "base64"}),
    ("/v1/rerank", {"query": "sky", "documents": ["hi", "The sky"]}),
    ("/v1/score", {"text_1": "sky", "text_2": ["hi", "The sky"]}),
]


async def test_a_repetition_gets_the_same_vectors(
    broker: Broker, tmp_path: Path, subtests: pytest.Subtests
) -> None:
    async with pooling_gateway(broker.url, tmp_path, save_encoder(tmp_path, "BERT")) as (worker, _, client):
        for number, (path, body) in enumerate(REQUESTS):
            with subtests.test(path=path, body=body):
                first = await client.post(path, json=body, headers=keyed(f"key-{number}"))
                assert first.status_code == 200, first.text
                num_seen = len(worker.seen)
                again = await client.post(path, json=body, headers=keyed(f"key-{number}"))
                assert (again.status_code, again.content) == (200, first.content)
                assert again.headers["idempotency-replayed"] == "true" and len(worker.seen) == num_seen
                other = await client.post(path, json=body | {"user": "b"}, headers=keyed(f"key-{number}"))
                assert other.status_code == 409
                assert "keys for idempotent requests" in other.text
