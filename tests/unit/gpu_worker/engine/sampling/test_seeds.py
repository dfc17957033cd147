"""Rows that sample, in the real engine: the same seed gives the same ids however rows are batched, chunked,
ordered and resumed.
"""

from typing import Any

import pytest

from common.messages.request import SamplingParams
from gpu_worker.engine.engine import Engine
from tests.support.engine.batch_player import AHEAD, Player
from tests.support.engine.reference import prompt_ids
from tests.support.engine.tiny_engine import play_rows
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
def prompts() -> dict[int, list[int]]:
    short = sorted(prompt_ids(PROMPTS), key=len)[2:9]
    return dict(enumerate([*short, short[0]]))


@pytest.fixture(scope="module")
def plain(loaded: Engine, prompts: dict[int, list[int]]) -> Player:
    """All rows in one batch."""
    loaded.runs_ahead = False
    return play(loaded, prompts)


def play(engine: Engine, rows: dict[int, list[int]], **how: Any) -> Player:
    params = {row: {"sampling": one, "top_n_tokens": row % 3} for row, one in ROWS.items()}
    return play_rows(engine, rows, new_tokens=NEW_TOKENS, params=params, **how)


def test_sampled_ids_depend_on_choice_and_parameters(plain: Player) -> None:
    """Two choices of a seed differ, a bad word never comes, and penalties avoid repetition."""
    assert plain.ids[0] != plain.ids[7]
    assert 28 not in plain.ids[6]
    assert len(set(plain.ids[5])) > NEW_TOKENS / 2
    assert {len(top) for (row, _), top in plain.top_logprobs.items() if row % 3 == 2} == {2}


@AHEAD
def test_chunked_prefill_another_order_and_a_resume_give_the_same_ids(
    engine: Engine, prompts: dict[int, list[int]], plain: Player
) -> None:
    another = {row: prompts[row] for row in (6, 7, 1, 0, 5, 3, 4, 2)}
    assert play(engine, another, prefill_tokens=7).ids == plain.ids
    shown = {row: ids[: 1 + row] for row, ids in plain.ids.items()}
    resumed = play(engine, prompts, shown=shown).ids
    assert {row: shown[row] + ids for row, ids in resumed.items()} == plain.ids
