"""Scores of a reranker over HTTP, in Cohere's shape and vLLM's."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from deploy.launcher.embedded_broker import Broker
from tests.support.pooling.pooling_gateway import VectorWorker, pooling_gateway
from tests.support.pooling.tiny_encoders import save_encoder

QUERY, TEXTS = "What is blue?", ["The sky is blue.", "hi", "Grass is green."]


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("reranker")
    return folder, save_encoder(folder, "BERT", num_labels=1)


def scores_of(worker: VectorWorker, text: str, pair: str | None = None) -> torch.Tensor:
    """What transformers' classifier makes of a text or a pair: float32 [labels]"""
    encoding = worker.tokenizer.encode(text, pair)
    with torch.inference_mode():
        output = worker.model(
            input_ids=torch.tensor([encoding.ids]), token_type_ids=torch.tensor([encoding.type_ids])
        )
    scores: torch.Tensor = output.logits[0]
    return scores


def check(found: Sequence[float], scores: torch.Tensor) -> None:
    torch.testing.assert_close(torch.tensor(found), scores, rtol=1e-5, atol=1e-6)


async def test_a_reranker_scores_each_pair(broker: Broker, reranker: tuple[Path, Any]) -> None:
    async with pooling_gateway(broker.url, *reranker, pooling="classify") as (worker, _, client):
        worker.tokenizer.no_truncation()
        raw = torch.cat([scores_of(worker, QUERY, text) for text in TEXTS])
        order = raw.argsort(descending=True).tolist()
        cohere = {"query": QUERY, "documents": [TEXTS[0], {"text": TEXTS[1]}, TEXTS[2]], "top_n": 2}
        for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
            answer = (await client.post(path, json=cohere)).json()
            assert [item["index"] for item in answer["results"]] == order[:2]
            check([item["relevance_score"] for item in answer["results"]], raw.sigmoid()[order[:2]])
            assert answer["results"][0]["document"] == {"text": TEXTS[order[0]]}
        pairs = {"text_1": [QUERY] * 3, "text_2": TEXTS}
        scores = (await client.post("/v1/score", json=pairs)).json()["data"]
        check([item["score"] for item in scores], raw.sigmoid())
        refused = await client.post("/v1/embeddings", json={"input": "hi"})
        assert "`tiny` is a reranker, and /v1/embeddings needs an embedding model" in refused.text


async def test_of_a_pair_the_longer_text_is_cut_first(broker: Broker, reranker: tuple[Path, Any]) -> None:
    async with pooling_gateway(broker.url, *reranker, pooling="classify") as (worker, _, client):
        worker.tokenizer.no_truncation()
        long = "green " * 100
        body = {"query": QUERY, "documents": [long]}
        assert (await client.post("/rerank", json=body)).status_code == 400
        cut = body | {"truncate_prompt_tokens": -1}
        assert (await client.post("/rerank", json=cut)).status_code == 200
        [request] = worker.seen
        worker.tokenizer.enable_truncation(60, strategy="longest_first")
        expected = worker.tokenizer.encode(QUERY, long)
        assert request.num_prompt == len(expected.ids) == 60
        assert request.pooling is not None
        assert request.pooling.pair_start == expected.type_ids.index(1)
