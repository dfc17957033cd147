"""Spans of a step: rows that decode are one, chunks of like lengths are one."""

from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_worker.engine.engine import Engine
from gpu_worker.engine.states.mixers import MixerRecorder, find_mixers
from gpu_worker.engine.states.row_states import RowStates, StateSpan, split_states
from tests.support.engine import tiny_models
from tests.support.engine.tiny_engine import engine_of, play
from tests.support.states.hybrid_models import HYBRIDS

LENGTHS = (40, 3, 300, 41, 1)
"""Of prompts: a row of 300 is longer than the others by too much."""


@pytest.fixture(scope="module")
def lfm2(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Engine]:
    folder: Path = tmp_path_factory.mktemp("lfm2")
    return tiny_models.save(folder, *HYBRIDS["LFM2"]), engine_of(folder)


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> list[list[StateSpan]]:
    """Of the steps that run."""
    seen = list[list[StateSpan]]()

    def noted(*arguments: Any) -> list[StateSpan]:
        seen.append(split_states(*arguments))
        return seen[-1]

    monkeypatch.setattr("gpu_worker.engine.states.model_states.split_states", noted)
    return seen


def test_prompts_of_like_lengths_are_one_span(lfm2: tuple[Any, Engine], spans: list[list[StateSpan]]) -> None:
    """Their ids are those of `generate`, though shorter ones are padded."""
    model, engine = lfm2
    prompts = {row: [5 + row] * length for row, length in enumerate(LENGTHS)}
    found = play(engine, prompts, new_tokens=4)
    assert found == {row: tiny_models.generate(model, prompt, 4) for row, prompt in prompts.items()}
    counts = [None if one.counts is None else one.counts.tolist() for one in spans[0]]
    assert counts == [None, [41, 40], [3, 1]]
    assert [one.decodes for one in spans[-1]] == [True]


def test_chunks_that_begin_and_go_on_are_one_span(
    lfm2: tuple[Any, Engine], spans: list[list[StateSpan]]
) -> None:
    model, engine = lfm2
    prompts = {row: [9 + row] * 24 for row in range(3)}
    found = play(engine, prompts, prefill_tokens=16, new_tokens=4)
    assert found == {row: tiny_models.generate(model, prompt, 4) for row, prompt in prompts.items()}
    assert any(
        one.fresh is not None and {*one.fresh.tolist()} == {True, False} for step in spans for one in step
    )


class Summing(torch.nn.Module):
    """A recurrence of its own, which knows nothing of padding."""

    def forward(self, hidden_states: torch.Tensor, cache_params: RowStates) -> torch.Tensor:
        """hidden_states [rows, tokens, hidden] of any dtype → the same shape"""
        before = cache_params.get_recurrent_state(0)
        sums = hidden_states.cumsum(1) + (0 if before is None else before[:, None])
        cache_params.update_recurrent_state(sums[:, -1], 0)
        return sums


def test_mixers_whose_scans_ignore_padding_compute_rows_one_by_one() -> None:
    recorder, mixer = MixerRecorder(), Summing()
    find_mixers(mixer)
    recorder.mix(mixer, torch.zeros(1, 8, 4))
    assert not recorder.packs
