"""Decoders that pool: the last token's vector, or its scores, alone, batched, in chunks and after shared
blocks.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from common.settings.settings import SettingError, Settings
from gpu_worker.engine.engine import Engine
from gpu_worker.engine.parallel.communicator import SINGLE_RANK
from gpu_worker.engine.start import make_engine
from tests.support.engine.tiny_engine import prompts
from tests.support.engine.tiny_models import LLAMA
from tests.support.engine.tiny_tokenizers import byte_level
from tests.support.pooling.pooled_rows import pool_rows
from tests.support.pooling.tiny_encoders import save_modules

SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "kv_cache_bytes": 2**23,
    "max_batch_prefill_tokens": 64,
    "block_size": 8,
    "debug_kv": True,
    "threads": 1,
}
SIZES = LLAMA | {"initializer_range": 0.2}


def engine_of(folder: Path, **settings: Any) -> Engine:
    made = make_engine(
        Settings(model_id=str(folder), **(SETTINGS | settings)), lambda _: None, SINGLE_RANK, None
    )
    assert isinstance(made, Engine)
    return made


def rows() -> dict[int, list[int]]:
    return dict(enumerate(prompts(), 1))


@torch.inference_mode()
def last_states(model: Any, ids: list[int]) -> torch.Tensor:
    """The states that the head gets, [tokens, hidden]."""
    states: torch.Tensor = model.base_model(input_ids=torch.tensor([ids])).last_hidden_state[0]
    return states


def check_vectors(engine: Engine, expected: dict[int, torch.Tensor]) -> None:
    for batch, prefill_tokens in (
        (rows(), 1000),
        (rows(), 7),
        *(({row: ids}, 1000) for row, ids in rows().items()),
    ):
        found = pool_rows(engine, batch, prefill_tokens=prefill_tokens)
        for row in batch:
            torch.testing.assert_close(found[row], expected[row], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["Llama", "Gemma2", "Cohere"])
def test_the_vector_is_the_last_state_of_the_last_token(tmp_path: Path, family: str) -> None:
    """Gemma 2 and Cohere change logits after their head."""
    changes = {"Gemma2": {"head_dim": 16, "final_logit_softcapping": 2.0}, "Cohere": {"logit_scale": 0.1}}
    model = save(tmp_path, family, SIZES | changes.get(family, {}))
    engine = engine_of(tmp_path, runner="pooling")
    check_vectors(engine, {row: last_states(model, ids)[-1] for row, ids in rows().items()})
    assert (engine.ready.pooling, engine.ready.vocab_size) == ("embed", 64)


def test_files_of_sentence_transformers_make_a_decoder_pool(tmp_path: Path) -> None:
    """As of Qwen3-Embedding: its weights are those of the model without a head."""
    model = save(tmp_path, "Llama", SIZES, kind="Model")
    save_modules(tmp_path, "pooling_mode_lasttoken")
    check_vectors(engine_of(tmp_path), {row: last_states(model, ids)[-1] for row, ids in rows().items()})


def test_scores_are_those_of_the_classifier(tmp_path: Path) -> None:
    """As of Qwen3-Reranker in its converted form."""
    model = save(tmp_path, "Llama", SIZES | {"num_labels": 1}, kind="ForSequenceClassification")
    expected = {}
    for row, ids in rows().items():
        with torch.inference_mode():
            expected[row] = model(input_ids=torch.tensor([ids])).logits[0]
    engine = engine_of(tmp_path)
    check_vectors(engine, expected)
    assert (engine.ready.pooling, engine.ready.vocab_size) == ("classify", 1)


def test_a_decoder_that_pools_by_the_mean_is_refused(tmp_path: Path) -> None:
    save(tmp_path, "Llama", SIZES)
    save_modules(tmp_path)
    with pytest.raises(SettingError, match=r"pools by mean: of a decoder, .* only lasttoken is served"):
        engine_of(tmp_path)


def save(folder: Path, family: str, sizes: dict[str, Any], kind: str = "ForCausalLM") -> Any:
    torch.manual_seed(5)
    config = getattr(transformers, f"{family}Config")(**sizes)
    model = getattr(transformers, family + kind)(config).eval()
    model.save_pretrained(folder)
    byte_level(folder)
    return model
