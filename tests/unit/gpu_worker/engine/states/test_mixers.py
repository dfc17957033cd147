"""Models with states, tiny and random: served with the ids of transformers' `generate`, or refused with the
cause.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from common.settings.settings import SettingError
from gpu_worker.engine.states import mixers
from gpu_worker.engine.states.mixers import MixerRecorder, check_parts, find_mixers
from gpu_worker.engine.states.row_states import CONV, RECURRENT, RowStates
from gpu_worker.protocol import UnservableModel
from tests.support.engine import tiny_models
from tests.support.engine.tiny_engine import MANY_NEW_TOKENS, NEW_TOKENS, check_ids, engine_of, prompts
from tests.support.states.hybrid_models import HYBRIDS

QUICK = ("LFM2", "Mamba2")
UNPADDED = ("Nemotron-H", "Zamba2")
"""Their scans have a shortest step, so states decay at padding, too."""
CASES = [
    *((name, NEW_TOKENS) for name in QUICK),
    *(pytest.param(name, MANY_NEW_TOKENS, marks=pytest.mark.slow) for name in HYBRIDS),
]


@pytest.mark.parametrize(("family", "new_tokens"), CASES)
def test_ids_are_those_of_generate(family: str, new_tokens: int, tmp_path: Path) -> None:
    """Alone, batched, in chunks of 7, resumed. Blocks of 8 tokens have no names, so none is shared."""
    model = tiny_models.save(tmp_path, *HYBRIDS[family])
    expected = {row: tiny_models.generate(model, prompt, new_tokens) for row, prompt in enumerate(prompts())}
    engine = engine_of(tmp_path)
    assert not engine.ready.prefix_caching and engine.ready.max_rows > 0
    assert engine.loaded.states.packs is (family not in UNPADDED)
    check_ids(engine, expected)


class Forgetful(nn.Module):
    """Adds its last input to each one, and forgets it between calls unless it `remembers`."""

    def __init__(self, remembers: bool) -> None:
        super().__init__()
        self.remembers = remembers

    def forward(self, hidden_states: torch.Tensor, cache_params: Any = None) -> torch.Tensor:
        """hidden_states [rows, tokens, hidden] of any dtype → the same shape"""
        inputs = hidden_states.transpose(1, 2)
        before = cache_params.get_conv_state(0) if self.remembers else None
        cache_params.update_conv_state(inputs, 0, conv_kernel_size=1)
        first = torch.zeros_like(inputs[..., :1]) if before is None else before
        return (inputs + torch.cat((first, inputs[..., :-1]), -1)).transpose(1, 2)


class Needy(nn.Module):
    def forward(self, hidden_states: torch.Tensor, rotary: torch.Tensor, cache_params: Any) -> torch.Tensor:
        """hidden_states [rows, tokens, hidden] of any dtype → the same shape"""
        cache_params.update_recurrent_state(hidden_states, 0)
        return hidden_states + rotary


def test_mixers_that_forget_between_calls_are_refused() -> None:
    for remembers in (True, False):
        mixer = Forgetful(remembers)
        find_mixers(mixer)
        if remembers:
            check_parts(mixer, torch.zeros(1, 1, 4))
        else:
            with pytest.raises(UnservableModel, match="Forgetful does not go on from the states"):
                check_parts(mixer, torch.zeros(1, 1, 4))


def test_mixers_that_need_more_than_hidden_states_are_refused() -> None:
    with pytest.raises(
        UnservableModel, match="Needy, which has states, needs more than hidden states: rotary"
    ):
        find_mixers(nn.Sequential(Needy()))


def test_a_mixer_that_is_used_twice_is_refused() -> None:
    """It would need two states."""
    recorder, mixer = MixerRecorder(), Forgetful(remembers=True)
    find_mixers(mixer)
    recorder.mix(mixer, torch.zeros(1, 8, 4))
    with pytest.raises(UnservableModel, match="used twice"):
        recorder.mix(mixer, torch.zeros(1, 8, 4))


def test_a_probe_lets_no_token_see_another() -> None:
    recorder, mixer = MixerRecorder(), Forgetful(remembers=True)
    find_mixers(mixer)
    hidden = torch.ones(1, 8, 4)
    hidden[:, 0] = torch.nan
    output = recorder.mix(mixer, hidden)
    assert output[0].isnan().all(-1).tolist() == [True] + [False] * 7
    [specs] = recorder.kept.values()
    assert [(name.kind, spec.shape) for name, spec in specs.items()] == [(CONV, (4, 1))]


def test_scans_that_forget_are_found_at_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mamba 1's scan begins with zeros in transformers, whatever its rows' states are."""
    monkeypatch.setattr(mixers, "continue_scans", lambda mixer: None)
    tiny_models.save(tmp_path, *HYBRIDS["Mamba"])
    with pytest.raises(SettingError, match="MambaMixer does not go on from the states that it leaves"):
        engine_of(tmp_path)


def test_rows_that_begin_have_no_states() -> None:
    states = RowStates()
    assert states.get_conv_state(0) is None and states.get_recurrent_state(0) is None
    assert states.update_conv_state(torch.ones(2, 3, 2), 0, conv_kernel_size=4).shape == (2, 3, 4)
    assert states.get_conv_state(0).tolist() == [[[0, 0, 1, 1]] * 3] * 2  # type: ignore[union-attr]
    state = torch.ones(2, 5)
    assert states.update_recurrent_state(state, 0) is state is states.get_recurrent_state(0)
    assert {name.kind for name in states.states} == {CONV, RECURRENT}
