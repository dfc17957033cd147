"""Models with states: the ids of transformers' generate, or a refusal; their scans and updates are
transformers'.
"""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.mamba import modeling_mamba

from gpu_worker.engine.states.mixers import MixerRecorder, check_parts, find_mixers
from gpu_worker.engine.states.model_states import RECURRENT, RowStates, StateName
from gpu_worker.engine.states.scans import continued
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


@pytest.mark.parametrize("gated", [False, True])
def test_two_scans_are_one(gated: bool) -> None:
    """Cut after 5 of 300 tokens, more than are carried at a time."""
    torch.manual_seed(1)
    rows, channels, size, tokens = 2, 6, 4, 300
    hidden, dt, gate = (torch.randn(rows, channels, tokens) for _ in range(3))
    decays = -torch.rand(channels, size)
    inputs, outputs = (torch.randn(rows, size, tokens) for _ in range(2))
    scan: Any = partial(continued, vars(modeling_mamba)["mamba_selective_scan"])

    def part(begin: int, end: int, rows: RowStates) -> tuple[torch.Tensor, torch.Tensor]:
        rows.first = rows.first_states()
        moving = (tensor[..., begin:end] for tensor in (hidden, dt))
        around = (decays, inputs[..., begin:end], outputs[..., begin:end])
        result: tuple[torch.Tensor, torch.Tensor] = scan(
            rows,
            *moving,
            *around,
            D=torch.ones(channels),
            z=gate[..., begin:end] if gated else None,
            delta_bias=torch.full((channels,), 0.5),
            delta_softplus=True,
            return_last_state=True,
        )
        return result

    whole, last = part(0, tokens, RowStates())
    first, state = part(0, 5, RowStates())
    rest, end = part(5, tokens, RowStates({StateName(RECURRENT, 0): state}))
    torch.testing.assert_close(torch.cat((first, rest), -1), whole, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(end, last, rtol=1e-4, atol=1e-4)
