"""Snapshots: a row that starts with cached blocks goes on from the states at their end."""

from pathlib import Path
from typing import Any

import pytest

from common.messages.request import BeamParams
from gpu_worker.engine.engine import Engine
from tests.support.engine import tiny_models
from tests.support.engine.batch_player import Player
from tests.support.engine.tiny_engine import engine_of, prompts
from tests.support.states.hybrid_models import HYBRIDS

BLOCK = 16
NEW = 20


@pytest.fixture(scope="module", params=["Granite4", "Qwen3-Next"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Engine]:
    folder: Path = tmp_path_factory.mktemp("served")
    return tiny_models.save(folder, *HYBRIDS[request.param]), engine_of(folder, block_size=BLOCK)


def player(engine: Engine) -> Player:
    played = Player(engine, list(range(1, engine.ready.num_blocks + 1)), until=engine.rows.step)
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
    played, prompt = player(engine), prompts()[3]
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
    played, prompt = player(engine), prompts()[3]
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
    played, prompt = player(engine), prompts()[2]
    first = played.run([played.start(1, prompt, NEW, ignore_eos=True)])[1]
    cached = played.tables[1][: len(prompt) // BLOCK]
    others = {2: prompt, 3: [*prompt, *first[:7]], 4: [*prompt, 9, 8, 7]}
    beams = played.start_behind(cached, 5, prompt, 4, beams=BeamParams(2, 1.0, 0), ignore_eos=True)
    starts = [played.start_behind(cached, row, ids, NEW, ignore_eos=True) for row, ids in others.items()]
    found = played.run([*starts, beams], lead=1)
    assert {row: found[row] for row in others} == {
        row: tiny_models.generate(model, ids, NEW) for row, ids in others.items()
    }


def test_granted_blocks_have_no_snapshot(served: tuple[Any, Engine]) -> None:
    """Their tokens are others now."""
    _, engine = served
    played = player(engine)
    played.run([played.start(1, prompts()[3], NEW, ignore_eos=True)])
    slots, used = engine.rows.state_slots, {*played.tables[1]}
    assert slots and used & slots.snapshots.slots.keys()
    played.kept, played.free = set(), sorted(used)
    played.run([played.start(2, prompts()[3][:4], 2, ignore_eos=True)])
    assert played.tables[2][0] not in slots.snapshots.slots


def test_snapshots_take_an_eighth_of_the_cache_at_most(served: tuple[Any, Engine]) -> None:
    _, engine = served
    states = engine.loaded.states
    assert 0 < states.num_snapshots <= 2 * states.num_slots
    assert states.slot_bytes * states.num_snapshots <= 2**23 // 8
