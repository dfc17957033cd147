"""The engine's ids equal those of transformers' `generate`, however rows are batched, chunked, delayed and
resumed.
"""

from collections.abc import Collection
from functools import partial
from typing import Any

import numpy as np
import pytest

from common import model_files
from gpu_worker.engine.engine import Engine
from gpu_worker.protocol import StepResult
from tests.support.engine import reference
from tests.support.engine.batch_player import AHEAD, player
from tests.support.engine.reference import prompt_ids, reference_ids
from tests.support.engine.row_steps import plan
from tests.support.engine.tiny_engine import play_rows
from tests.support.prompts import FEW, PROMPTS

ALL = pytest.param(list(range(len(PROMPTS))), id="all", marks=pytest.mark.slow)
FEWER = FEW[1:3] + FEW[5:7]
"""Where rows come in many steps, or run several times."""


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return prompt_ids(PROMPTS)


def new_tokens(indices: Collection[int]) -> int:
    """How many are generated: of a few prompts, in the default run, one more than a block has."""
    return 17 if len(indices) <= len(FEW) else 40


def expected(prompts: list[list[int]], indices: list[int]) -> dict[int, list[int]]:
    answers = reference_ids([prompts[index] for index in indices], 40)
    count = new_tokens(indices)
    return {index: answer[:count] for index, answer in zip(indices, answers, strict=True)}


@AHEAD
@pytest.mark.parametrize("indices", [pytest.param(FEW, id="few"), ALL])
def test_ids_equal_generate(engine: Engine, prompts: list[list[int]], indices: list[int]) -> None:
    """Of all rows at once; with a budget of 7 tokens, no divisor of the block size, so that chunks end
    anywhere in a block; and of rows that start with some of their tokens generated elsewhere.
    """
    answers, end = expected(prompts, indices), new_tokens(indices)
    rows = {index: prompts[index] for index in indices}
    few = {index: prompts[index] for index in (FEWER if indices == FEW else indices)}
    play: Any = partial(play_rows, engine, new_tokens=end, ignore_eos=False)
    whole = play(rows)
    assert whole.ids == answers and len(whole.free) == engine.ready.num_blocks
    ends = {index: ("length" if len(ids) == end else "eos_token", len(ids)) for index, ids in answers.items()}
    assert whole.ended == ends
    chunked = play(few, prefill_tokens=7)
    assert chunked.ids == {index: answers[index] for index in few}
    assert len(chunked.steps) >= sum(map(len, few.values())) / 7
    shown = {index: ids[: min(5 + 3 * index, len(ids) - 1)] for index, ids in answers.items()}
    resumed = play(rows, shown=shown)
    assert {index: shown[index] + ids for index, ids in resumed.ids.items()} == answers
    assert resumed.ended == ends


@AHEAD
def test_ids_of_rows_that_start_with_blocks_of_others(engine: Engine, prompts: list[list[int]]) -> None:
    """Of a prompt's twin while it runs, and of the next turn, which has the answer, too."""
    answers, played = expected(prompts, FEWER), player(engine)
    played.kept, end = set(played.free), new_tokens(FEWER)
    played.run([played.start(index, prompts[index], end) for index in FEWER])
    twins = [played.start_after(index, 100 + index, prompts[index], end) for index in FEWER]
    assert any(start.num_cached for start in twins)
    ids = played.run(twins)
    assert {index: ids[100 + index] for index in FEWER} == answers
    turns = {index: [*prompts[index], *answers[index], *prompts[0][:5]] for index in FEWER}
    played.run([played.start(200 + index, turn, end) for index, turn in turns.items()])
    seconds = [played.start_after(index, 300 + index, turn, end) for index, turn in turns.items()]
    assert max(start.num_cached for start in seconds) > max(start.num_cached for start in twins)
    played.run(seconds)
    assert {index: ids[300 + index] for index in FEWER} == {index: ids[200 + index] for index in FEWER}


def test_freed_blocks_are_nan_unless_they_are_full(engine: Engine, prompts: list[list[int]]) -> None:
    played = player(engine)
    played.run([played.start(0, prompts[20], end=1)])
    full, rest = divmod(len(prompts[20]), engine.block_size)
    assert full and rest
    for tensor in (*engine.loaded.cache.keys, *engine.loaded.cache.values):
        assert tensor[1 + full].isnan().all()
        assert tensor[: 1 + full].isfinite().all()
    engine.apply(plan(played.until, 0, [played.start(1, prompts[20], end=1)]))
    assert not any(tensor[1].any() for tensor in (*engine.loaded.cache.keys, *engine.loaded.cache.values))
    engine.apply(plan(played.until, 0, stops=[(1, "cancelled")]))
    assert engine.step() == StepResult(played.steps[-1].step, ended=[(1, "cancelled", 0)], released=[(1, 0)])
    assert engine.step() is None


@pytest.mark.slow
def test_answers_in_the_tree_are_those_of_transformers() -> None:
    path = model_files.resolve("smollm2", dtype="float32")
    model = reference.load(path)
    for question, answer in reference.in_the_tree().items():
        assert question.model == path.name
        given = reference.answer(model, question)
        if given and isinstance(given[0], tuple):
            given, answer = (list(zip(*sequences, strict=True)) for sequences in (given, answer))
            assert given[0] == tuple(answer[0])
            given, answer = given[1], answer[1]
        assert np.allclose(given, answer, rtol=0, atol=1e-3), question
