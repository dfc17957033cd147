"""A forward that runs out of memory runs again in halves: ids stay the same, and the engine keeps running."""

from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_worker.engine.batch.inputs import Inputs
from gpu_worker.engine.engine import Engine
from tests.support.engine import tiny_models
from tests.support.engine.batch_player import Player
from tests.support.engine.tiny_engine import engine_of
from tests.support.engine.tiny_models import FAMILIES, VOCAB

NEW_TOKENS = 12


class ScarceBackend:
    """An attention backend that runs out of memory beyond `room` tokens, from the step `since` on."""

    def __init__(self, backend: Any, room: int, since: int, error: RuntimeError) -> None:
        self.backend = backend
        self.room = room
        self.since = since
        self.error = error
        self.steps = 0
        self.num_raised = 0

    def prepare_forward(self, inputs: Inputs) -> None:
        self.steps += 1
        if self.steps >= self.since and inputs.ids.shape[1] > self.room:
            self.num_raised += 1
            raise self.error
        self.backend.prepare_forward(inputs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)


@pytest.fixture(params=[False, True], ids=["", "ahead"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Engine:
    tiny_models.save(tmp_path, *FAMILIES["Qwen3"])
    engine = engine_of(tmp_path)
    engine.runs_ahead = request.param
    return engine


def play(engine: Engine) -> Player:
    torch.manual_seed(1)
    played = Player(engine, list(range(1, engine.ready.num_blocks + 1)), until=engine.rows.step)
    prompts = [torch.randint(3, VOCAB, (length,)).tolist() for length in (3, 30, 11, 1)]
    params = [{"prompt_logprobs": 1}, {"prompt_logprobs": 0}, {}, {"prompt_logprobs": 0}]
    played.run(
        [
            played.start(row, ids, NEW_TOKENS, ignore_eos=True, **params[row])
            for row, ids in enumerate(prompts)
        ]
    )
    return played


def limit(engine: Engine, **rules: Any) -> ScarceBackend:
    scarce = ScarceBackend(engine.loaded.backend, **rules)
    object.__setattr__(engine.loaded, "backend", scarce)
    return scarce


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    ],
)
@pytest.mark.parametrize(("room", "since"), [(7, 1), (1, 1), (2, 5)])
def test_a_split_step_gives_the_same_ids(engine: Engine, room: int, since: int, error: RuntimeError) -> None:
    expected = play(engine)
    scarce = limit(engine, room=room, since=since, error=error)
    found = play(engine)
    assert scarce.num_raised and found.ids == expected.ids
    assert {row: len(logprobs) for row, logprobs in found.prompt_logprobs.items()} == {0: 2, 1: 29}
    for row, logprobs in found.prompt_logprobs.items():
        assert logprobs == pytest.approx(expected.prompt_logprobs[row], abs=1e-5)
        assert [*found.prompt_tops[row]] == [
            pytest.approx(top, abs=1e-5) for top in expected.prompt_tops[row]
        ]


def test_a_row_that_does_not_fit_alone_is_an_error(engine: Engine) -> None:
    limit(engine, room=0, since=1, error=torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(torch.OutOfMemoryError):
        play(engine)
