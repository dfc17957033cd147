"""Rows that sample, in the real engine: the same seed gives the same ids however rows are batched, chunked,
ordered and resumed.
"""

from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import chisquare

from common.messages.request import SamplingParams
from gpu_worker.engine.engine import Engine
from tests.support.engine.batch_player import Player
from tests.support.engine.reference import prompt_ids, reference_ids
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
"""What row n asks for; row 7 has the prompt of row 0."""


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    short = sorted(prompt_ids(PROMPTS), key=len)[2:9]
    return [*short, short[0]]


@pytest.fixture(scope="module")
def answers(loaded: Engine, prompts: list[list[int]]) -> dict[int, list[int]]:
    """All rows at once."""
    loaded.runs_ahead = False
    return play(loaded, prompts, list(ROWS))


def player(engine: Engine, prefill_tokens: int = 10_000) -> Player:
    return Player(engine, list(range(1, 1 + engine.ready.num_blocks)), prefill_tokens, until=engine.rows.step)


def play(
    engine: Engine,
    prompts: list[list[int]],
    rows: list[int],
    prefill_tokens: int = 10_000,
    shown: dict[int, list[int]] | None = None,
) -> dict[int, list[int]]:
    """The ids of these rows, with what was shown before."""
    played, shown = player(engine, prefill_tokens), shown or {row: [] for row in rows}
    starts = [
        played.start(
            row,
            prompts[row] + shown[row],
            NEW_TOKENS,
            len(shown[row]),
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
        for index in range(len(shown[row]), NEW_TOKENS)
    )
    return {row: shown[row] + ids[row] for row in rows}


def test_rows_sample(answers: dict[int, list[int]]) -> None:
    """Choices differ, rows that ask differ from the plain ones, and are no noise."""
    assert answers[0] != answers[7]
    assert 28 not in answers[6]
    assert len(set(answers[5])) > NEW_TOKENS / 2


def test_alone(engine: Engine, prompts: list[list[int]], answers: dict[int, list[int]]) -> None:
    for row in (0, 6):
        assert play(engine, prompts, [row]) == {row: answers[row]}


def test_chunked_and_in_another_order(
    engine: Engine, prompts: list[list[int]], answers: dict[int, list[int]]
) -> None:
    assert play(engine, prompts, [6, 7, 1, 0, 5, 3, 4, 2], prefill_tokens=7) == answers


def test_resumed(engine: Engine, prompts: list[list[int]], answers: dict[int, list[int]]) -> None:
    shown = {row: answers[row][: 1 + row] for row in ROWS}
    assert play(engine, prompts, list(ROWS), shown=shown) == answers


def test_plain_rows_beside_others_stay_greedy(
    engine: Engine, prompts: list[list[int]], answers: dict[int, list[int]]
) -> None:
    expected = reference_ids([prompts[2]], NEW_TOKENS)[0]
    assert answers[2][: len(expected)] == expected


def test_sampled_ids_follow_what_the_engine_says(engine: Engine, prompts: list[list[int]]) -> None:
    """The first token of many rows that differ in their seed, against the log-probabilities that the first of
    them tells.
    """
    num, top_k = 250, 8
    played, sampling = player(engine), SamplingParams(temperature=1.0, top_k=top_k)
    prompt = prompts[0][:1]
    played.run(
        [
            played.start(
                row, prompt, 1, ignore_eos=True, sampling=replace(sampling, seed=row), top_n_tokens=top_k
            )
            for row in range(num)
        ]
    )
    told = played.top_logprobs[0, 0]
    expected = num * np.exp(list(told.values()))
    counts = np.array([sum(ids == [token] for ids in played.ids.values()) for token in told])
    assert counts.sum() == num == pytest.approx(expected.sum(), rel=1e-5)
    assert expected.min() > 4 and chisquare(counts, expected, sum_check=False).pvalue > 1e-3


def test_no_end_before_so_many_tokens(engine: Engine, prompts: list[list[int]]) -> None:
    """The likeliest tokens of a row as its stop ids: none comes before `min_new_tokens`, one ends it after."""
    greedy = play(engine, prompts, [2])[2]
    played = player(engine)
    played.run(
        [
            played.start(0, prompts[2], NEW_TOKENS, min_new_tokens=5, stop_ids=greedy),
            played.start(1, prompts[2], NEW_TOKENS, stop_ids=greedy),
        ]
    )
    assert not set(played.ids[0][:5]) & set(greedy)
    assert played.ended[1] == ("stop_sequence", 1) and played.ids[1] == greedy[:1]
    assert played.ended[0][1] >= 5
