"""Rows that sample, in the real engine: the same seed gives the same ids however rows are batched, chunked,
ordered and resumed.
"""

import pytest

from common.messages.request import SamplingParams
from gpu_worker.engine.engine import Engine
from tests.support.engine.batch_player import AHEAD, player
from tests.support.engine.reference import prompt_ids
from tests.support.prompts import PROMPTS

NEW_TOKENS = 10
ROWS: dict[int, SamplingParams | None] = {
    0: SamplingParams(temperature=1.0, top_p=0.9, seed=11),
    1: SamplingParams(temperature=0.7, seed=11),
    2: None,
    3: SamplingParams(temperature=1.2, top_k=40, min_p=0.02, seed=11, raw_logprobs=True),
    4: SamplingParams(temperature=1.0, typical_p=0.8, seed=11),
    5: SamplingParams(repetition_penalty=1.5, frequency_penalty=0.5, presence_penalty=0.5),
    6: SamplingParams(
        temperature=0.9,
        relative_frequency_penalty=1.5,
        repetition_penalty=1.1,
        seed=5,
        bad_words=[[28]],
    ),
    7: SamplingParams(temperature=1.0, top_p=0.9, seed=11, choice=1),
}
"""Sampling parameters of row n; row 7 has the prompt of row 0."""


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    short = sorted(prompt_ids(PROMPTS), key=len)[2:9]
    return [*short, short[0]]


@pytest.fixture(scope="module")
def all_ids(loaded: Engine, prompts: list[list[int]]) -> dict[int, list[int]]:
    """The ids of all rows in one batch."""
    loaded.runs_ahead = False
    return play(loaded, prompts, list(ROWS))


def play(
    engine: Engine,
    prompts: list[list[int]],
    rows: list[int],
    prefill_tokens: int = 10_000,
    generated: dict[int, list[int]] | None = None,
) -> dict[int, list[int]]:
    """Returns the ids of these rows, those generated before included."""
    played = player(engine, prefill_tokens)
    generated = generated or {row: [] for row in rows}
    starts = [
        played.start(
            row,
            prompts[row] + generated[row],
            NEW_TOKENS,
            len(generated[row]),
            ignore_eos=True,
            sampling=ROWS[row],
            top_n_tokens=row % 3,
        )
        for row in rows
    ]
    ids = played.run(starts)
    assert all(
        len(played.top_logprobs[row, index]) == row % 3
        for row in rows
        if row % 3
        for index in range(len(generated[row]), NEW_TOKENS)
    )
    return {row: generated[row] + ids[row] for row in rows}


def test_sampled_ids_depend_on_choice_and_parameters(all_ids: dict[int, list[int]]) -> None:
    """Two choices of a seed differ, a bad word never comes, and penalties avoid repetition."""
    assert all_ids[0] != all_ids[7]
    assert 28 not in all_ids[6]
    assert len(set(all_ids[5])) > NEW_TOKENS / 2


@AHEAD
def test_chunked_prefill_and_another_order_give_the_same_ids(
    engine: Engine, prompts: list[list[int]], all_ids: dict[int, list[int]]
) -> None:
    assert play(engine, prompts, [6, 7, 1, 0, 5, 3, 4, 2], prefill_tokens=7) == all_ids


@AHEAD
def test_resumed_rows_have_the_same_ids(
    engine: Engine, prompts: list[list[int]], all_ids: dict[int, list[int]]
) -> None:
    generated = {row: all_ids[row][: 1 + row] for row in ROWS}
    assert play(engine, prompts, list(ROWS), generated=generated) == all_ids
