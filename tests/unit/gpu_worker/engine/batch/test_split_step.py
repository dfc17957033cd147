"""A forward that runs out of memory runs again in halves with the same ids; one that raises for a row fails
this row alone.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from common.rank import RankInfo
from gpu_worker.engine.batch.inputs import Inputs
from gpu_worker.engine.engine import Engine
from gpu_worker.engine.parallel.communicator import Communicator
from tests.support.engine import tiny_models
from tests.support.engine.batch_player import Player, player
from tests.support.engine.row_steps import plan
from tests.support.engine.tiny_engine import NEW_TOKENS, engine_of, play, prompts
from tests.support.engine.tiny_models import FAMILIES, VOCAB

BAD = 1
"""An id that is in none of the prompts."""
OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory")


class FailingBackend:
    """An attention backend that raises where `fails` says so of a step's ids.

    Attributes:
        sizes: how many tokens had the steps for which it raised.
    """

    def __init__(self, backend: Any, fails: Any, error: Exception) -> None:
        self.backend = backend
        self.fails = fails
        self.error = error
        self.steps = 0
        self.sizes: list[int] = []

    def prepare_forward(self, inputs: Inputs) -> None:
        self.steps += 1
        if self.fails(inputs.ids.flatten().tolist(), self.steps):
            self.sizes.append(inputs.ids.numel())
            raise self.error
        self.backend.prepare_forward(inputs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_models.save(folder, *FAMILIES["Qwen3"])
    return folder


@pytest.fixture(scope="module")
def made(folder: Path) -> Engine:
    return engine_of(folder)


@pytest.fixture
def ending(folder: Path) -> Engine:
    """An engine that ends with a test."""
    return engine_of(folder)


@pytest.fixture
def engine(made: Engine) -> Iterator[Engine]:
    backend = made.loaded.backend
    yield made
    set_backend(made, backend)
    made.runs_ahead = False
    assert not made.rows.rows


def set_backend(engine: Engine, backend: Any) -> Any:
    object.__setattr__(engine.loaded, "backend", backend)
    return backend


def limit(engine: Engine, room: int, since: int = 1, error: Exception = OUT_OF_MEMORY) -> FailingBackend:
    """Steps of more than `room` tokens run out of memory, from the step `since` on."""
    backend = FailingBackend(
        engine.loaded.backend, lambda ids, step: step >= since and len(ids) > room, error
    )
    set_backend(engine, backend)
    return backend


def break_for(engine: Engine, *bad: int) -> FailingBackend:
    """Steps with one of these ids fail."""
    error = ValueError("these ids are too much")
    backend = FailingBackend(engine.loaded.backend, lambda ids, step: set(bad) & set(ids), error)
    set_backend(engine, backend)
    return backend


def play_scored(engine: Engine) -> Player:
    torch.manual_seed(1)
    played = player(engine)
    lines = [torch.randint(3, VOCAB, (length,)).tolist() for length in (3, 30, 11, 1)]
    params = [{"prompt_logprobs": 1}, {"prompt_logprobs": 0}, {}, {"prompt_logprobs": 0}]
    played.run([played.start(row, ids, 12, ignore_eos=True, **params[row]) for row, ids in enumerate(lines)])
    return played


@pytest.mark.parametrize(
    ("room", "since", "error"),
    [
        (7, 1, OUT_OF_MEMORY),
        (1, 1, RuntimeError("DefaultCPUAllocator: can't allocate memory")),
        (2, 5, OUT_OF_MEMORY),
    ],
)
def test_a_split_step_gives_the_same_ids(engine: Engine, room: int, since: int, error: Exception) -> None:
    engine.runs_ahead = since > 1
    expected = play_scored(engine)
    scarce = limit(engine, room, since, error)
    found = play_scored(engine)
    assert scarce.sizes and found.ids == expected.ids
    assert {row: len(logprobs) for row, logprobs in found.prompt_logprobs.items()} == {0: 2, 1: 29}
    for row, logprobs in found.prompt_logprobs.items():
        assert logprobs == pytest.approx(expected.prompt_logprobs[row], abs=1e-5)
        tops = [pytest.approx(top, abs=1e-5) for top in expected.prompt_tops[row]]
        assert [*found.prompt_tops[row]] == tops


def test_a_prompt_for_which_the_forward_raises_fails_alone(engine: Engine) -> None:
    good = dict(enumerate(prompts()))
    expected = play(engine, good)
    failing = break_for(engine, BAD)
    rows = {0: good[0], 9: [5, BAD, 6]} | good
    played = player(engine)
    found = played.run([played.start(row, ids, NEW_TOKENS, ignore_eos=True) for row, ids in rows.items()])
    assert found == expected | {9: []}
    assert played.ended[9] == ("forward", 0)
    assert {why for row, (why, _) in played.ended.items() if row != 9} == {"length"}
    assert failing.sizes[-1] == 3 and len(failing.sizes) <= 4, "a step of five rows, halves, and the row"


@pytest.mark.parametrize("ahead", [False, True])
def test_a_row_fails_when_it_samples_what_the_forward_raises_for(engine: Engine, ahead: bool) -> None:
    """Its tokens before that one stay, and the others keep theirs."""
    engine.runs_ahead = ahead
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


def test_ranks_do_not_try_again(ending: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that raised may have left the others within a sum."""
    failing = break_for(ending, BAD)
    ranks = Communicator.__new__(Communicator)
    ranks.info, ranks.rank, ranks.world_size, ranks.tp_size = RankInfo(), 0, 2, 2
    monkeypatch.setattr(ending, "communicator", ranks)
    played = player(ending)
    starts = [played.start(row, ids, 4) for row, ids in ((1, [5, 6]), (2, [BAD]))]
    ending.apply(plan(ending.rows.step + 1, 1000, starts, blocks=played.grow(4, 2)))
    with pytest.raises(ValueError, match="too much"):
        ending.step()
    assert len(failing.sizes) == 1


@pytest.mark.parametrize("error", ["memory", "forward"])
def test_an_engine_that_fails_for_every_row_fails_none(ending: Engine, error: str) -> None:
    """Model or device are broken, or a row does not fit alone: the worker ends, its rows go on elsewhere."""
    if error == "memory":
        limit(ending, room=0)
    else:
        break_for(ending, *range(VOCAB))
    with pytest.raises((ValueError, torch.OutOfMemoryError)):
        play(ending, dict(enumerate(prompts())))
    assert not ending.rows.take_result().ended
