"""Vectors and scores, over HTTP and as jobs: OpenAI's /v1/embeddings, and rerankers in Cohere's shape and
vLLM's.
"""

import base64
import struct
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from common.messages.request import Generate
from deploy.launcher.embedded_broker import Broker
from tests.integration.api.test_admin import Figures
from tests.support.answers import post
from tests.support.fleet.gateways import nothing_left
from tests.support.pooling.pooling_gateway import VectorWorker, pooling_gateway
from tests.support.pooling.tiny_encoders import MAX_TOKENS, save_encoder, save_modules

TEXTS = ["The sky is blue.", "hi", "Grass is green, and water is wet."]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("encoder")
    model = save_encoder(folder, "BERT")
    save_modules(folder)
    return folder, model


@pytest.fixture
async def served(
    broker: Broker, encoder: tuple[Path, Any]
) -> AsyncIterator[tuple[VectorWorker, httpx.AsyncClient]]:
    async with pooling_gateway(broker.url, *encoder) as (worker, gateway, client):
        yield worker, client
        await nothing_left(gateway, worker)


def expected(worker: VectorWorker, text: str, normalized: bool = True) -> torch.Tensor:
    """The mean of the last hidden states, by transformers."""
    ids = worker.tokenizer.encode(text).ids
    with torch.inference_mode():
        vector: torch.Tensor = worker.model(input_ids=torch.tensor([ids])).last_hidden_state[0].mean(0)
    return torch.nn.functional.normalize(vector, dim=0) if normalized else vector


def check(found: Any, vector: torch.Tensor) -> None:
    torch.testing.assert_close(torch.tensor(found), vector, rtol=1e-5, atol=1e-6)


async def test_openai_gets_a_vector_for_each_input_in_order(served: Any) -> None:
    worker, client = served
    worker.tokenizer.no_truncation()
    answer = await post(client, "/v1/embeddings", {"input": TEXTS, "user": "me"})
    assert [item["index"] for item in answer["data"]] == [0, 1, 2]
    for text, item in zip(TEXTS, answer["data"], strict=True):
        check(item["embedding"], expected(worker, text))
    num_tokens = sum(len(worker.tokenizer.encode(text).ids) for text in TEXTS)
    assert answer["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    assert (answer["object"], answer["model"], answer["data"][0]["object"]) == ("list", "tiny", "embedding")


async def test_it_is_counted_with_its_times_as_any_request(served: Any) -> None:
    _, client = served
    figures = await Figures(client).begin()
    answer = await client.post("/v1/embeddings", json={"input": TEXTS})
    times = [int(answer.headers[f"x-{name}-time"]) for name in ("total", "validation", "queue", "inference")]
    assert min(times) >= 0 and max(times) == times[0] < 3_600_000
    await figures.until("tgi_request_count", 1)
    await figures.until("tgi_request_success", len(TEXTS))
    assert await figures.added("tgi_request_queue_duration_sum") >= 0


async def test_base64_is_of_little_endian_floats_and_dimensions_are_normalised_again(served: Any) -> None:
    worker, client = served
    body = {"input": TEXTS[0], "encoding_format": "base64", "dimensions": 5}
    [item] = (await post(client, "/v1/embeddings", body))["data"]
    found = struct.unpack("<5f", base64.b64decode(item["embedding"]))
    whole = expected(worker, TEXTS[0], normalized=False)
    check(found, torch.nn.functional.normalize(whole[:5], dim=0))


async def test_token_ids_are_taken_as_they_are(served: Any) -> None:
    worker, client = served
    ids = [worker.tokenizer.encode(text).ids for text in TEXTS]
    several = (await post(client, "/v1/embeddings", {"input": ids}))["data"]
    one = (await post(client, "/v1/embeddings", {"input": ids[1]}))["data"]
    assert [item["embedding"] for item in one] == [several[1]["embedding"]]
    check(several[2]["embedding"], expected(worker, TEXTS[2]))


async def test_a_vector_is_not_normalised_where_asked(served: Any) -> None:
    worker, client = served
    for name in ("use_activation", "normalize"):
        [item] = (await post(client, "/v1/embeddings", {"input": TEXTS[0], name: False}))["data"]
        check(item["embedding"], expected(worker, TEXTS[0], normalized=False))


async def test_scores_of_an_embedding_model_are_cosines(served: Any) -> None:
    worker, client = served
    query, *documents = TEXTS
    source = expected(worker, query)
    cosines = [float(expected(worker, text) @ source) for text in documents]
    body = {"text_1": query, "text_2": documents}
    scores = (await post(client, "/v1/score", body))["data"]
    check([item["score"] for item in scores], torch.tensor(cosines))
    answer = await post(client, "/v1/rerank", {"query": query, "documents": documents, "top_n": 1})
    best = max(range(2), key=cosines.__getitem__)
    [result] = answer["results"]
    assert (result["index"], result["document"]) == (best, {"text": documents[best]})
    assert len(worker.seen) == 2 * len(TEXTS), "each text is computed once"


async def test_models_and_info_say_what_it_makes(served: Any) -> None:
    _, client = served
    [model, *_] = (await client.get("/v1/models")).json()["data"]
    assert (model["id"], model["task"]) == ("tiny", "embed")
    assert (await client.get("/v1/models/tiny")).json()["task"] == "embed"
    info = (await client.get("/info")).json()
    assert (info["model_pipeline_tag"], info["max_input_tokens"]) == ("feature-extraction", MAX_TOKENS)


async def test_long_inputs_are_cut_where_the_client_says_so(served: Any) -> None:
    worker, client = served
    text = "word " * 100
    refused = await client.post("/v1/embeddings", json={"input": ["hi", text]})
    assert refused.status_code == 400
    assert f"`input[1]` must have at most {MAX_TOKENS} tokens" in refused.json()["error"]["message"]
    for path, body in (
        ("/v1/embeddings", {"input": text, "truncate_prompt_tokens": -1}),
        ("/v1/embeddings", {"input": text, "truncate_prompt_tokens": 9}),
        (
            "/v1/embeddings",
            {"input": "first " + text, "truncate_prompt_tokens": 9, "truncation_side": "left"},
        ),
    ):
        assert (await client.post(path, json=body)).status_code == 200
    [first, second] = worker.tokenizer.encode("", add_special_tokens=True).ids
    prompts = [torch.frombuffer(bytearray(one.prompt_ids), dtype=torch.int32).tolist() for one in worker.seen]
    assert [len(ids) for ids in prompts] == [MAX_TOKENS, 9, 9]
    assert all((ids[0], ids[-1]) == (first, second) for ids in prompts), "with the tokens around a text"
    assert prompts[1] == prompts[2]


REFUSED: list[tuple[str, dict[str, Any], int, str]] = [
    ("/v1/embeddings", {"input": []}, 400, "`input` must have 1 to 4 items. Given: 0"),
    ("/v1/embeddings", {"input": ["hi", ""]}, 400, "`input[1]` cannot be empty"),
    ("/v1/embeddings", {"input": [[5, 99_999]]}, 400, "`input[0]` must have token ids of at least 0"),
    ("/v1/embeddings", {"input": "hi", "dimensions": 33}, 400, "`dimensions` must be at most 32. Given: 33"),
    ("/v1/embeddings", {"input": "hi", "messages": []}, 400, "`messages` is not supported"),
    ("/v1/embeddings", {"input": ["hi"] * 5}, 400, "`input` must have 1 to 4 items. Given: 5"),
    ("/v1/rerank", {"query": "hi", "documents": []}, 400, "`documents` must have 1 to 4 items"),
    ("/v1/rerank", {"query": "hi", "documents": ["a"] * 5}, 400, "`documents` must have 1 to 4 items"),
    ("/v1/score", {"text_1": ["a"] * 4, "text_2": ["b"] * 4}, 400, "8 vectors: MAX_CONCURRENT_REQUESTS is 5"),
    ("/v1/embeddings", {"input": "hi", "prompt_name": "x"}, 400, "`prompt_name` is not supported"),
    ("/v1/embeddings", {"input": "hi", "task": "token_embed"}, 400, "`task` is not supported"),
    *(
        ("/rerank", {"query": "hi", "documents": ["a"], name: value}, 400, f"`{name}` is not supported")
        for name, value in (
            ("instruction", "Find answers"),
            ("chat_template_kwargs", {"instruction": "Find answers"}),
            ("max_tokens_per_doc", 10),
            ("max_tokens_per_query", 10),
            ("padding", "max_length"),
            ("rank_fields", ["title"]),
        )
    ),
    ("/rerank", {"query": "hi", "texts": ["a"]}, 400, "`documents`: Field required"),
    ("/embed", {"inputs": "hi"}, 404, "In its place this server has /v1/embeddings"),
    ("/pooling", {"input": "hi"}, 404, "In its place this server has /v1/embeddings"),
    ("/classify", {"input": "hi"}, 404, "In its place this server has /v1/rerank and /v1/score"),
    ("/v1/score", {"text_1": ["a", "b"], "text_2": "c"}, 400, "`text_1` must be one text, or as many as"),
    ("/v1/completions", {"prompt": "hi"}, 400, "`tiny` is an embedding model: it generates no text"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}, 400, "generates no text"),
    ("/generate", {"inputs": "hi"}, 422, "`tiny` is an embedding model: it generates no text"),
]


async def test_what_cannot_be_served_is_named(broker: Broker, encoder: tuple[Path, Any]) -> None:
    limits: dict[str, Any] = {"max_client_batch_size": 4, "max_concurrent_requests": 5}
    async with pooling_gateway(broker.url, *encoder, **limits) as (worker, gateway, client):
        for path, body, status, words in REFUSED:
            answer = await client.post(path, json=body)
            assert answer.status_code == status and words in answer.text, (path, answer.text)
        assert not worker.seen
        most = {"query": "hi", "documents": ["a"] * 4}
        assert len((await post(client, "/v1/rerank", most))["results"]) == 4, "the query is no document"
        gateway.pool.tokenizer.num_embedded = 3  # of a model whose tokenizer has more
        for given in ("hi", [1, 3]):
            answer = await client.post("/v1/embeddings", json={"input": [given]})
            assert (
                answer.status_code == 400 and "must have token ids of at least 0 and below 3" in answer.text
            )


async def test_a_vector_is_never_asked_of_a_worker_that_only_generates(
    broker: Broker, encoder: tuple[Path, Any]
) -> None:
    async with pooling_gateway(broker.url, *encoder, pooling="") as (worker, _, client):
        answer = await client.post("/v1/embeddings", json={"input": "hi"})
    assert answer.status_code == 503
    assert "no worker that is ready makes vectors" in answer.text
    assert worker.seen == list[Generate]()


QUERY, DOCUMENTS = "What is blue?", ["The sky is blue.", "hi", "Grass is green."]


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


def check_rerank(found: Sequence[float], scores: torch.Tensor) -> None:
    torch.testing.assert_close(torch.tensor(found), scores, rtol=1e-5, atol=1e-6)


async def test_a_reranker_scores_each_pair(broker: Broker, reranker: tuple[Path, Any]) -> None:
    async with pooling_gateway(broker.url, *reranker, pooling="classify") as (worker, _, client):
        worker.tokenizer.no_truncation()
        raw = torch.cat([scores_of(worker, QUERY, text) for text in DOCUMENTS])
        order = raw.argsort(descending=True).tolist()
        cohere = {
            "query": QUERY,
            "documents": [DOCUMENTS[0], {"text": DOCUMENTS[1]}, DOCUMENTS[2]],
            "top_n": 2,
        }
        for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
            answer = await post(client, path, cohere)
            assert [item["index"] for item in answer["results"]] == order[:2]
            check_rerank([item["relevance_score"] for item in answer["results"]], raw.sigmoid()[order[:2]])
            assert answer["results"][0]["document"] == {"text": DOCUMENTS[order[0]]}
        pairs = {"text_1": [QUERY] * 3, "text_2": DOCUMENTS}
        scores = (await post(client, "/v1/score", pairs))["data"]
        check_rerank([item["score"] for item in scores], raw.sigmoid())
        for activated, expected in ((True, raw.sigmoid()), (False, raw)):
            scores = (await post(client, "/v1/score", pairs | {"use_activation": activated}))["data"]
            check_rerank([item["score"] for item in scores], expected)
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
