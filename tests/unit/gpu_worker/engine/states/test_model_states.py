"""States of rows in a pool of slots, counted, given and copied; snapshots from which later rows go on. Mixers
that keep states, or are refused; their scans are transformers'.
"""

import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.mamba import modeling_mamba

from common.messages.request import BeamParams
from common.settings.settings import Settings
from gpu_worker.engine.drafting.load_draft import load_draft
from gpu_worker.engine.engine import Engine
from gpu_worker.engine.model.load import load
from gpu_worker.engine.parallel.communicator import SINGLE_RANK
from gpu_worker.engine.states.model_states import (
    RECURRENT,
    ModelStates,
    RowStates,
    check_parts,
    find_mixers,
)
from gpu_worker.engine.states.scans import continued
from gpu_worker.protocol import AdapterAnswer, SetAdapter, UnservableModel
from tests.support.adapters.tiny_adapters import check_adapters, load_adapters, save_adapter
from tests.support.engine import tiny_models
from tests.support.engine.batch_player import Player, player
from tests.support.engine.tiny_engine import answers, engine_of, play, prompts
from tests.support.engine.tiny_models import HYBRIDS
from tests.support.parameters.slow_but import slow_but

SETTINGS: dict[str, Any] = {"dtype": "float32", "max_batch_prefill_tokens": 64, "block_size": 8, "threads": 1}
Ids = dict[int, list[int]]


@pytest.fixture(scope="module")
def granite(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ids]:
    folder = tmp_path_factory.mktemp("granite")
    return folder, answers(tiny_models.save(folder, *HYBRIDS["Granite4"]))


@pytest.fixture(scope="module")
def engine(granite: tuple[Path, Ids]) -> Engine:
    return engine_of(granite[0])


def test_rows_wait_for_slots(
    granite: tuple[Path, Ids], engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two slots serve four rows, as a row that has ended holds its slot while a step is in flight."""
    slots = engine.rows.state_slots
    assert slots
    monkeypatch.setattr(engine, "runs_ahead", True)
    monkeypatch.setattr(slots, "free", slots.free[-2:])
    assert play(engine, dict(enumerate(prompts()))) == granite[1]
    assert sorted(slots.free) == [1, 2]


def test_a_step_that_fails_half_way_is_computed_again(
    granite: tuple[Path, Ids], engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """States are written once the whole step is computed. Here its head fails for all steps of two rows."""
    head, calls = engine.loaded.model.lm_head.forward, list[int]()

    def failing(hidden: torch.Tensor) -> Any:
        calls.append(hidden.shape[1])
        if hidden.shape[1] > 1 and len(calls) > 5:
            raise torch.OutOfMemoryError("no room")
        return head(hidden)

    monkeypatch.setattr(engine.loaded.model.lm_head, "forward", failing)
    assert play(engine, dict(enumerate(prompts())), prefill_tokens=16) == granite[1]
    assert max(calls[6:]) > 1


def test_an_engine_wakes_with_empty_slots(granite: tuple[Path, Ids]) -> None:
    engine = engine_of(granite[0])
    engine.sleep()
    states = engine.loaded.states
    assert {len(state) for one in states.pool.values() for state in one.values()} == {1}
    assert engine.wake_up(print).max_rows == states.num_slots
    assert play(engine, dict(enumerate(prompts()))) == granite[1]


@pytest.mark.slow
def test_adapters_change_attention_and_no_mixer(granite: tuple[Path, Ids], tmp_path: Path) -> None:
    """Mixers are called with parts of a step, which adapters do not know."""
    model = AutoModelForCausalLM.from_pretrained(granite[0], dtype=torch.float32, attn_implementation="eager")
    served = save_adapter(model, tmp_path / "served", 1, target_modules=["q_proj", "v_proj", "o_proj"])
    refused = save_adapter(model, tmp_path / "refused", 2, target_modules=["in_proj"])
    engine = engine_of(granite[0])
    load_adapters(engine, {"served": served})
    check_adapters(engine, model, {"served": served}, ["", "served"])
    answer = engine.obey(SetAdapter("refused", str(refused)))
    assert isinstance(answer, AdapterAnswer) and "has states, and adapters change none such" in answer.cause


def test_states_count_within_the_memory_of_the_cache(granite: tuple[Path, Ids]) -> None:
    """States take half of it at most; where they need more, fewer rows run."""
    loaded = load(
        Settings(model_id=str(granite[0]), kv_cache_bytes=2**20, **SETTINGS), print, SINGLE_RANK, load_draft
    )
    states, blocks = loaded.states, loaded.cache.num_blocks
    assert 0 < states.num_slots < 256
    assert states.slot_bytes * (states.num_slots + 1) <= 2**19 < states.slot_bytes * (states.num_slots + 2)
    assert 2**19 - loaded.geometry.block_bytes < blocks * loaded.geometry.block_bytes <= 2**20
    few = Settings(model_id=str(granite[0]), kv_cache_bytes=2**20, max_batch_size=3, **SETTINGS)
    assert load(few, print, SINGLE_RANK, load_draft).states.num_slots == 3


def test_rows_with_states_propose_nothing(
    granite: tuple[Path, Ids], caplog: pytest.LogCaptureFixture
) -> None:
    """States cannot go back from wrong proposals."""
    with caplog.at_level(logging.WARNING):
        engine = engine_of(granite[0], speculate=3)
    assert "SPECULATE is off" in caplog.text
    repeating = [5, 6, 7] * 8
    played = player(engine)
    played.run([played.start(1, repeating, 8, ignore_eos=True)])
    assert played.num_proposed == 0


BLOCK = 16
NEW = 20


@pytest.fixture(scope="module", params=slow_but(["Qwen3-Next"], ["Granite4", "Qwen3-Next"]))
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Engine]:
    folder: Path = tmp_path_factory.mktemp("served")
    return tiny_models.save(folder, *HYBRIDS[request.param]), engine_of(folder, block_size=BLOCK)


def keeping_player(engine: Engine) -> Player:
    played = player(engine)
    played.kept = {*played.free}
    return played


def blocks_with_snapshots(played: Player) -> set[int]:
    """As the batcher learns of them."""
    found = set[int]()
    for block in [block for step in played.steps for block in step.snapshots]:
        if block > 0:
            found.add(block)
        else:
            found.discard(-block)
    return found


def prefilled(played: Player) -> int:
    return sum(step.prefill_tokens for step in played.steps)


def test_a_second_turn_goes_on_from_the_end_of_the_first(served: tuple[Any, Engine]) -> None:
    model, engine = served
    assert engine.ready.prefix_caching
    played, prompt = keeping_player(engine), prompts()[3]
    answer = played.run([played.start(1, prompt, NEW, ignore_eos=True)])[1]
    ends = [played.tables[1].index(block) + 1 for block in sorted(blocks_with_snapshots(played))]
    assert sorted(ends) == [len(prompt) // BLOCK, (len(prompt) + NEW - 1) // BLOCK]
    later = [*prompt, *answer, *prompts()[1]]
    expected, before = tiny_models.generate(model, later, NEW), prefilled(played)
    cached = played.tables[1][: max(ends)]
    assert played.run([played.start_behind(cached, 2, later, NEW, ignore_eos=True)])[2] == expected
    assert prefilled(played) - before == len(later) - max(ends) * BLOCK


def test_a_row_whose_snapshot_is_gone_is_computed_from_its_start(served: tuple[Any, Engine]) -> None:
    """The batcher may not know yet: ids stay those of `generate`."""
    model, engine = served
    played, prompt = keeping_player(engine), prompts()[3]
    played.run([played.start(1, prompt, NEW, ignore_eos=True)])
    slots, cached = engine.rows.state_slots, played.tables[1][: len(prompt) // BLOCK]
    assert slots
    slots.snapshots.forget(cached)
    before = prefilled(played)
    found = played.run([played.start_behind(cached, 2, prompt, NEW, ignore_eos=True)])[2]
    assert found == tiny_models.generate(model, prompt, NEW)
    assert prefilled(played) - before == len(prompt)


def test_rows_beside_each_other_start_from_one_snapshot(served: tuple[Any, Engine]) -> None:
    model, engine = served
    played, prompt = keeping_player(engine), prompts()[2]
    first = played.run([played.start(1, prompt, NEW, ignore_eos=True)])[1]
    cached = played.tables[1][: len(prompt) // BLOCK]
    others = {2: prompt, 3: [*prompt, *first[:7]], 4: [*prompt, 9, 8, 7]}
    beams = played.start_behind(cached, 5, prompt, 4, beams=BeamParams(2, 1.0, 0), ignore_eos=True)
    starts = [played.start_behind(cached, row, ids, NEW, ignore_eos=True) for row, ids in others.items()]
    found = played.run([*starts, beams], lead=1)
    assert {row: found[row] for row in others} == {
        row: tiny_models.generate(model, ids, NEW) for row, ids in others.items()
    }


# --- mixers -------------------------------------------------------------------------------------------------


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
        find_mixers(mixer, ModelStates())
        if remembers:
            check_parts(mixer, torch.zeros(1, 1, 4))
        else:
            with pytest.raises(UnservableModel, match="Forgetful does not go on from the states"):
                check_parts(mixer, torch.zeros(1, 1, 4))


def test_mixers_that_need_more_than_hidden_states_are_refused() -> None:
    with pytest.raises(
        UnservableModel, match="forward, of a layer with states, needs more than hidden states: rotary"
    ):
        find_mixers(nn.Sequential(Needy()), ModelStates())


def test_a_mixer_that_is_used_twice_is_refused() -> None:
    """It would need two states."""
    states, mixer = ModelStates(), Forgetful(remembers=True)
    find_mixers(mixer, states)
    states.try_out(mixer, torch.zeros(1, 8, 4))
    with pytest.raises(UnservableModel, match="used twice"):
        states.try_out(mixer, torch.zeros(1, 8, 4))


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
    rest, end = part(5, tokens, RowStates({(RECURRENT, 0): state}))
    torch.testing.assert_close(torch.cat((first, rest), -1), whole, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(end, last, rtol=1e-4, atol=1e-4)
