"""A forward that raises for one row fails this row alone: the others have the tokens of a step without it."""

from pathlib import Path
from typing import Any

import pytest

from common.rank import RankInfo
from gpu_worker.engine.batch.inputs import Inputs
from gpu_worker.engine.engine import Engine
from gpu_worker.engine.parallel.communicator import Communicator
from gpu_worker.protocol import Grant
from tests.support.engine import tiny_models
from tests.support.engine.batch_player import Player, unpacked
from tests.support.engine.tiny_engine import NEW_TOKENS, engine_of, play, prompts
from tests.support.engine.tiny_models import FAMILIES

BAD = 1
"""An id that is in none of the prompts."""


class RaisingBackend:
    """An attention backend that raises for steps with a certain id."""

    def __init__(self, backend: Any, bad: set[int]) -> None:
        self.backend = backend
        self.bad = bad
        self.sizes: list[int] = []

    def prepare_forward(self, inputs: Inputs) -> None:
        if self.bad & set(inputs.ids.flatten().tolist()):
            self.sizes.append(inputs.ids.numel())
            raise ValueError("these ids are too much")
        self.backend.prepare_forward(inputs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)


@pytest.fixture(params=[False, True], ids=["", "ahead"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Engine:
    tiny_models.save(tmp_path, *FAMILIES["Qwen3"])
    engine = engine_of(tmp_path)
    engine.runs_ahead = request.param
    return engine


def break_for(engine: Engine, *ids: int) -> RaisingBackend:
    raising = RaisingBackend(engine.loaded.backend, set(ids))
    object.__setattr__(engine.loaded, "backend", raising)
    return raising


@pytest.mark.parametrize("place", [0, 2, 4])
def test_a_prompt_for_which_the_forward_raises_fails_alone(engine: Engine, place: int) -> None:
    good = prompts()
    expected = play(engine, dict(enumerate(good)))
    raising = break_for(engine, BAD)
    rows = dict(enumerate(good))
    rows = dict([*rows.items()][:place]) | {9: [5, BAD, 6]} | dict([*rows.items()][place:])
    played = Player(engine, list(range(1, engine.ready.num_blocks + 1)), 1000, until=engine.rows.step)
    found = played.run([played.start(row, ids, NEW_TOKENS, ignore_eos=True) for row, ids in rows.items()])
    assert found == expected | {9: []}
    assert played.ended[9] == ("forward", 0)
    assert {why for row, (why, _) in played.ended.items() if row != 9} == {"length"}
    assert raising.sizes[-1] == 3 and len(raising.sizes) <= 4, "a step of five rows, halves, and the row"


def test_a_row_fails_when_it_samples_what_the_forward_raises_for(engine: Engine) -> None:
    """Its tokens before that one stay, and the others keep theirs."""
    rows = dict(enumerate(prompts()))
    expected = play(engine, rows)
    known = {token for ids in rows.values() for token in ids}
    bad = next(token for token in expected[1][5:] if token not in known)
    break_for(engine, bad)
    found = play(engine, rows)
    for row, ids in expected.items():
        until = ids.index(bad) + 1 if bad in ids[:-1] else NEW_TOKENS
        late = engine.runs_ahead and until < NEW_TOKENS  # the step of that id is not read yet
        assert found[row] == ids[: until - late], row
    assert found != expected


def test_blocks_that_were_not_computed_are_not_reported_as_such(engine: Engine) -> None:
    break_for(engine, BAD)
    played = Player(engine, list(range(1, engine.ready.num_blocks + 1)), 16, until=engine.rows.step)
    played.run([played.start(1, [5] * 40 + [BAD], 5)])
    [released] = [one for step in played.steps for one in step.released]
    assert released == (1, 32), "two whole steps of sixteen tokens"


def test_several_rows_of_a_step_fail_and_the_rest_goes_on(engine: Engine) -> None:
    good = prompts()
    expected = play(engine, dict(enumerate(good)))
    break_for(engine, BAD)
    found = play(engine, dict(enumerate(good)) | {row: [BAD] * row for row in (7, 8, 9)})
    assert found == expected | {7: [], 8: [], 9: []}


def test_an_engine_that_fails_for_every_row_fails_none(engine: Engine) -> None:
    """Model or device are broken: the worker ends, and its rows go on elsewhere."""
    rows = dict(enumerate(prompts()))
    break_for(engine, *range(tiny_models.VOCAB))
    with pytest.raises(ValueError, match="too much"):
        play(engine, rows)
    assert not engine.rows.take_result().ended


def test_ranks_do_not_try_again(engine: Engine) -> None:
    """One that raised may have left the others within a sum."""
    raising = break_for(engine, BAD)
    engine.communicator = Communicator.__new__(Communicator)
    engine.communicator.info, engine.communicator.rank, engine.communicator.world_size = RankInfo(), 0, 2
    engine.communicator.tp_size = 2
    played = Player(engine, list(range(1, engine.ready.num_blocks + 1)), 1000)
    starts = [played.start(row, ids, 4) for row, ids in ((1, [5, 6]), (2, [BAD]))]
    engine.apply(Grant(engine.rows.step + 1, 1000, starts, played.grow(4, 2)))
    with pytest.raises(ValueError, match="too much"):
        engine.step()
    assert len(raising.sizes) == 1


def test_a_step_that_none_computes_is_no_step(engine: Engine) -> None:
    break_for(engine, BAD)
    before = engine.rows.step
    played = Player(engine, list(range(1, engine.ready.num_blocks + 1)), 1000)
    start = played.start(1, [BAD], 4)
    engine.apply(Grant(before + 1, 1000, [start]))
    result = engine.step()
    assert result and result.step == before and result.ended == ((1, "forward", 0),)
    assert [number for number, _ in result.released] == [1] and unpacked(start.blocks) == played.rows[
        1
    ].blocks
    assert engine.step() is None and engine.rows.step == before
