"""Rows that sample, in the real engine: the same seed gives the same ids however rows are batched, chunked,
ordered and resumed.
"""

from dataclasses import replace

import numpy as np
import pytest

from common.messages.request import SamplingParams
from gpu_worker.engine.engine import Engine
from tests.support.engine.batch_player import Player
from tests.support.engine.reference import prompt_ids, reference_ids
from tests.support.engine.sampling_reference import fits
from tests.support.prompts import PROMPTS
from tests.support.runahead.each_way import AHEAD

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


def player(engine: Engine, prefill_tokens: int = 10_000) -> Player:
    return Player(engine, list(range(1, 1 + engine.ready.num_blocks)), prefill_tokens, until=engine.rows.step)


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
def test_a_row_alone_has_the_same_ids(
    engine: Engine, prompts: list[list[int]], all_ids: dict[int, list[int]]
) -> None:
    for row in (0, 6):
        assert play(engine, prompts, [row]) == {row: all_ids[row]}


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


def test_greedy_rows_beside_others_stay_greedy(
    engine: Engine, prompts: list[list[int]], all_ids: dict[int, list[int]]
) -> None:
    expected = reference_ids([prompts[2]], NEW_TOKENS)[0]
    assert all_ids[2][: len(expected)] == expected


@pytest.mark.slow
def test_sampled_ids_follow_the_reported_logprobs(engine: Engine, prompts: list[list[int]]) -> None:
    """The first token of many rows that differ in their seed, against the log-probabilities reported with the
    first row.
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
    reported = played.top_logprobs[0, 0]
    expected = num * np.exp(list(reported.values()))
    counts = np.array([sum(ids == [token] for ids in played.ids.values()) for token in reported])
    assert counts.sum() == num == pytest.approx(expected.sum(), rel=1e-5)
    assert expected.min() > 4 and fits(counts, expected)


@AHEAD
def test_no_stop_id_comes_before_min_new_tokens(engine: Engine, prompts: list[list[int]]) -> None:
    """The stop ids are the tokens that greedy sampling gives: one ends the row from `min_new_tokens` on."""
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
