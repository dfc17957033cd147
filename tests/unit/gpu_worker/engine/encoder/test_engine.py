"""Encoders: vectors and scores are those of transformers' own model and of the pooling's formula."""

import json
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from common.messages.request import PoolingParams
from common.pooling import read_pooling
from common.settings.settings import SettingError, Settings
from gpu_worker.engine.batch.row import RowSlice
from gpu_worker.engine.encoder.engine import EncoderEngine
from gpu_worker.engine.parallel.communicator import SINGLE_RANK
from gpu_worker.engine.start import make_engine
from tests.support.pooling.pooled_rows import pool_rows
from tests.support.pooling.tiny_encoders import ENCODERS, save_encoder, save_modules

LENGTHS = (1, 5, 30, 5, 60, 47)
SETTINGS: dict[str, Any] = {"threads": 1, "max_batch_prefill_tokens": 64, "block_size": 8, "device": "cpu"}


def engine_of(folder: Path, **settings: Any) -> EncoderEngine:
    made = make_engine(
        Settings(model_id=str(folder), **(SETTINGS | settings)), lambda _: None, SINGLE_RANK, None
    )
    assert isinstance(made, EncoderEngine)
    return made


def prompts() -> dict[int, list[int]]:
    torch.manual_seed(1)
    return {row: torch.randint(4, 480, (length,)).tolist() for row, length in enumerate(LENGTHS, 1)}


@torch.inference_mode()
def states_of(model: Any, ids: list[int]) -> torch.Tensor:
    """Last hidden states [tokens, hidden] of one sequence, by transformers' own attention."""
    states: torch.Tensor = model(input_ids=torch.tensor([ids])).last_hidden_state[0]
    return states


@pytest.mark.parametrize("name", ENCODERS)
def test_mean_of_a_packed_batch_is_that_of_each_sequence_alone(tmp_path: Path, name: str) -> None:
    model = save_encoder(tmp_path, name)
    save_modules(tmp_path)
    engine = engine_of(tmp_path)
    expected = {row: states_of(model, ids).mean(0) for row, ids in prompts().items()}
    for batch in (prompts(), *({row: ids} for row, ids in prompts().items())):
        found = pool_rows(engine, batch, prefill_tokens=64)
        for row in batch:
            torch.testing.assert_close(found[row], expected[row], rtol=1e-5, atol=1e-5)
    assert engine.ready.context == 60
    assert engine.ready.pooling == "embed"


@pytest.mark.parametrize(
    "mode", ["pooling_mode_cls_token", "pooling_mode_lasttoken", "pooling_mode_max_tokens"]
)
def test_other_ways_to_pool_and_a_dense_layer(tmp_path: Path, mode: str) -> None:
    model = save_encoder(tmp_path, "BERT")
    save_modules(tmp_path, mode, dense=True)
    found = pool_rows(engine_of(tmp_path), prompts())
    torch.manual_seed(3)
    weight, bias = torch.randn(24, 32), torch.randn(24)
    for row, ids in prompts().items():
        states = states_of(model, ids)
        pooled = {"cls": states[0], "las": states[-1], "max": states.amax(0)}[mode[13:16]]
        torch.testing.assert_close(found[row], (weight @ pooled + bias).tanh(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ENCODERS)
def test_scores_of_pairs_are_those_of_the_classifier(tmp_path: Path, name: str) -> None:
    config = {"classifier_pooling": "mean"} if name == "ModernBERT" else {}
    model = save_encoder(tmp_path, name, num_labels=1, **config)
    engine = engine_of(tmp_path)
    has_types = name == "BERT"
    found = pool_rows(engine, prompts(), {row: PoolingParams(pair_start=4) for row in prompts()})
    for row, ids in prompts().items():
        types = (
            {"token_type_ids": torch.tensor([[int(i >= 4) for i in range(len(ids))]])} if has_types else {}
        )
        with torch.inference_mode():
            expected = model(input_ids=torch.tensor([ids]), **types).logits[0]
        torch.testing.assert_close(found[row], expected, rtol=1e-5, atol=1e-5)
    assert engine.ready.pooling == "classify"
    assert engine.ready.vocab_size == 1


def test_a_step_has_no_more_tokens_than_granted_unless_one_prompt_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_encoder(tmp_path, "BERT")
    engine = engine_of(tmp_path)
    steps: list[list[int]] = []
    forward = engine.vectors

    def note(slices: Sequence[RowSlice]) -> torch.Tensor:
        steps.append([row_slice.count for row_slice in slices])
        return forward(slices)

    monkeypatch.setattr(engine, "vectors", note)
    pool_rows(engine, prompts(), prefill_tokens=40)
    assert sorted(chain(*steps)) == sorted(LENGTHS)
    assert all(sum(step) <= 40 or len(step) == 1 for step in steps)


def test_a_prompt_that_fails_leaves_the_others_alone(tmp_path: Path) -> None:
    model = save_encoder(tmp_path, "BERT")
    engine = engine_of(tmp_path)
    bad = prompts() | {9: [10_000]}  # beyond the embedding
    with pytest.raises(AssertionError, match="forward"):
        pool_rows(engine, bad)
    found = pool_rows(engine, {20: prompts()[2]})
    torch.testing.assert_close(found[20], states_of(model, prompts()[2]).mean(0), rtol=1e-5, atol=1e-5)


def test_it_gives_its_memory_up_and_takes_it_back(tmp_path: Path) -> None:
    save_encoder(tmp_path, "BERT")
    engine = engine_of(tmp_path)
    before = pool_rows(engine, {1: prompts()[3]})[1]
    engine.sleep()
    assert engine.wake_up(lambda _: None) == engine.ready
    assert torch.equal(pool_rows(engine, {2: prompts()[3]})[2], before)


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"runner": "generate"}, "RUNNER: generate, but .* is an encoder, which makes no text"),
        ({"quantize": "fp8"}, "QUANTIZE: fp8 is not served for encoders"),
    ],
)
def test_what_an_encoder_cannot_do_is_refused(tmp_path: Path, settings: dict[str, Any], words: str) -> None:
    save_encoder(tmp_path, "BERT")
    with pytest.raises(SettingError, match=words):
        engine_of(tmp_path, **settings)


@pytest.mark.parametrize(
    "mode, words",
    [
        ({"pooling_mode_weightedmean_tokens": True}, "pools by weightedmean; one of cls, mean"),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, "pools by cls and mean; one of"),
        ({"pooling_mode": "mean", "include_prompt": False}, "leaves prompts out"),
    ],
)
def test_ways_to_pool_that_are_not_served_are_named(tmp_path: Path, mode: dict[str, Any], words: str) -> None:
    save_encoder(tmp_path, "BERT")
    save_modules(tmp_path)
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(mode))
    with pytest.raises(SettingError, match=words):
        read_pooling(tmp_path, Settings(model_id=str(tmp_path)))


def test_a_classifier_of_several_labels_is_refused(tmp_path: Path) -> None:
    save_encoder(tmp_path, "BERT", num_labels=3)
    with pytest.raises(SettingError, match=r"has 3 labels: only models with one score \(rerankers\)"):
        read_pooling(tmp_path, Settings(model_id=str(tmp_path)))
