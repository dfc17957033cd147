"""Models that pool: encoders' vectors and scores are those of transformers, a decoder's of its last token."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from common.messages.request import PoolingParams
from gpu_worker.engine.engine import Engine
from tests.support.engine.tiny_engine import engine_of, prompts
from tests.support.engine.tiny_models import LLAMA
from tests.support.engine.tiny_tokenizers import byte_level
from tests.support.pooling.pooled_rows import PLAIN, pool_rows
from tests.support.pooling.tiny_encoders import ENCODERS, save_encoder, save_modules

LENGTHS = (1, 5, 30, 5, 60, 47)


def lines() -> dict[int, list[int]]:
    torch.manual_seed(1)
    return {row: torch.randint(4, 480, (length,)).tolist() for row, length in enumerate(LENGTHS, 1)}


def rows() -> dict[int, list[int]]:
    return dict(enumerate(prompts(), 1))


@torch.inference_mode()
def states_of(model: Any, ids: list[int]) -> torch.Tensor:
    """Last hidden states [tokens, hidden] of one sequence, by transformers' own attention."""
    states: torch.Tensor = model.base_model(input_ids=torch.tensor([ids])).last_hidden_state[0]
    return states


@torch.inference_mode()
def score_of(model: Any, ids: list[int], **inputs: torch.Tensor) -> torch.Tensor:
    score: torch.Tensor = model(input_ids=torch.tensor([ids]), **inputs).logits[0]
    return score


def check(
    engine: Engine,
    given: dict[int, list[int]],
    expected: Callable[[list[int]], torch.Tensor],
    ready: tuple[str, int],
    how: PoolingParams = PLAIN,
) -> None:
    """Rows have what is expected of their ids: together, in steps of few tokens, and alone. `ready`: what is
    pooled, and how many numbers it has.
    """
    wanted, alone = (
        {row: expected(ids) for row, ids in given.items()},
        [{row: ids} for row, ids in given.items()],
    )
    for number, batch in enumerate((given, given, *alone)):
        found = pool_rows(engine, batch, dict.fromkeys(batch, how), prefill_tokens=7 if number == 1 else 64)
        for row in batch:
            torch.testing.assert_close(found[row], wanted[row], rtol=1e-5, atol=1e-5)
    assert (engine.ready.pooling, engine.ready.vocab_size) == ready


@pytest.mark.parametrize("name", ENCODERS)
def test_mean_of_a_packed_batch_is_that_of_each_sequence_alone(tmp_path: Path, name: str) -> None:
    model = save_encoder(tmp_path, name)
    save_modules(tmp_path)
    engine = engine_of(tmp_path)
    check(engine, lines(), lambda ids: states_of(model, ids).mean(0), ("embed", 32))
    assert engine.ready.context == 60


@pytest.mark.parametrize(
    "mode", ["pooling_mode_cls_token", "pooling_mode_lasttoken", "pooling_mode_max_tokens"]
)
def test_other_ways_to_pool_and_a_dense_layer(tmp_path: Path, mode: str) -> None:
    model = save_encoder(tmp_path, "BERT")
    save_modules(tmp_path, mode, dense=True)
    torch.manual_seed(3)
    weight, bias = torch.randn(24, 32), torch.randn(24)

    def expected(ids: list[int]) -> torch.Tensor:
        states = states_of(model, ids)
        pooled = {"cls": states[0], "las": states[-1], "max": states.amax(0)}[mode[13:16]]
        return (weight @ pooled + bias).tanh()

    check(engine_of(tmp_path), lines(), expected, ("embed", 24))


@pytest.mark.parametrize("name", ENCODERS)
def test_scores_of_pairs_are_those_of_the_classifier(tmp_path: Path, name: str) -> None:
    config = {"classifier_pooling": "mean"} if name == "ModernBERT" else {}
    model = save_encoder(tmp_path, name, num_labels=1, **config)

    def expected(ids: list[int]) -> torch.Tensor:
        types = torch.tensor([[int(i >= 4) for i in range(len(ids))]])
        return score_of(model, ids, **({"token_type_ids": types} if name == "BERT" else {}))

    check(engine_of(tmp_path), lines(), expected, ("classify", 1), PoolingParams(pair_start=4))


def test_a_prompt_that_fails_leaves_the_others_alone(tmp_path: Path) -> None:
    model = save_encoder(tmp_path, "BERT")
    engine = engine_of(tmp_path)
    bad = lines() | {9: [10_000]}  # beyond the embedding
    with pytest.raises(AssertionError, match="forward"):
        pool_rows(engine, bad)
    found = pool_rows(engine, {20: lines()[2]})
    torch.testing.assert_close(found[20], states_of(model, lines()[2]).mean(0), rtol=1e-5, atol=1e-5)


def test_it_gives_its_memory_up_and_takes_it_back(tmp_path: Path) -> None:
    save_encoder(tmp_path, "BERT")
    engine = engine_of(tmp_path)
    before = pool_rows(engine, {1: lines()[3]})[1]
    engine.sleep()
    assert engine.wake_up(lambda _: None) == engine.ready
    assert torch.equal(pool_rows(engine, {2: lines()[3]})[2], before)


SIZES = LLAMA | {"initializer_range": 0.2}


@pytest.mark.parametrize("family", ["Llama", "Gemma2", "Cohere"])
def test_the_vector_is_the_last_state_of_the_last_token(tmp_path: Path, family: str) -> None:
    """Gemma 2 and Cohere change logits after their head."""
    changes = {"Gemma2": {"head_dim": 16, "final_logit_softcapping": 2.0}, "Cohere": {"logit_scale": 0.1}}
    model = save(tmp_path, family, SIZES | changes.get(family, {}))
    engine = engine_of(tmp_path, runner="pooling")
    check(engine, rows(), lambda ids: states_of(model, ids)[-1], ("embed", 64))


def test_files_of_sentence_transformers_make_a_decoder_pool(tmp_path: Path) -> None:
    """As of Qwen3-Embedding: its weights are those of the model without a head."""
    model = save(tmp_path, "Llama", SIZES, kind="Model")
    save_modules(tmp_path, "pooling_mode_lasttoken")
    check(engine_of(tmp_path), rows(), lambda ids: states_of(model, ids)[-1], ("embed", 64))


def test_scores_are_those_of_the_classifier(tmp_path: Path) -> None:
    """As of Qwen3-Reranker in its converted form."""
    model = save(tmp_path, "Llama", SIZES | {"num_labels": 1}, kind="ForSequenceClassification")
    check(engine_of(tmp_path), rows(), lambda ids: score_of(model, ids), ("classify", 1))


def save(folder: Path, family: str, sizes: dict[str, Any], kind: str = "ForCausalLM") -> Any:
    torch.manual_seed(5)
    config = getattr(transformers, f"{family}Config")(**sizes)
    model = getattr(transformers, family + kind)(config).eval()
    model.save_pretrained(folder)
    byte_level(folder)
    return model
