"""Speculation: ids, log-probabilities and KV are those of rows that sample one token a step."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from common.messages.request import SamplingParams
from common.settings.speculation import read_speculation
from gpu_worker.engine.drafting.proposers import proposer_factory
from gpu_worker.engine.engine import Engine
from tests.support.engine import tiny_models
from tests.support.engine.batch_player import Player, player
from tests.support.engine.reference import prompt_ids, reference_ids
from tests.support.engine.tiny_engine import CHUNKED, SCARCE, check_ways, engine_of, play_rows, prompts
from tests.support.engine.tiny_models import FAMILIES
from tests.support.parameters.slow_but import slow_but
from tests.support.prompts import FEW, PROMPTS
from tests.support.speculation.knowing_proposer import KnowingProposers

NEW_TOKENS = 48
SEEDED = SamplingParams(temperature=0.7, seed=11)
ROWS: dict[int, SamplingParams | None] = {
    0: None,
    1: SEEDED,
    2: replace(SEEDED, top_p=0.8, repetition_penalty=1.3, frequency_penalty=0.3, presence_penalty=0.2),
    3: replace(SEEDED, top_k=20, choice=1, top_p=0.9, top_p_decay=0.9, top_p_min=0.2),
    4: SamplingParams(repetition_penalty=1.2, relative_frequency_penalty=1.0),
    5: replace(SEEDED, logit_bias=[(7, 3.0)], bad_words=[[7, 9], [11]], raw_logprobs=True),
    6: replace(SEEDED, allowed_token_ids=list(range(3, 60))),
    7: replace(SEEDED, watermark_delta=2.0),
}
"""Sampling parameters of row n."""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = tmp_path_factory.mktemp("model")
    tiny_models.save(folder, *FAMILIES["Llama"])
    return engine_of(folder, block_size=16)


ROW_IDS = {row: prompts()[row % 4] + [3 + row] * (row > 3) for row in ROWS}
PARAMS = {
    row: {"sampling": sampling, "top_n_tokens": row % 3, "min_new_tokens": 9, "ignore_eos": row % 2 == 0}
    for row, sampling in ROWS.items()
}


def play(engine: Engine, **how: Any) -> Player:
    return play_rows(engine, ROW_IDS, new_tokens=NEW_TOKENS, params=PARAMS, **how)


@pytest.fixture(scope="module")
def plain(engine: Engine) -> Player:
    return play(engine)


WAYS = {
    "right": (0.0, False, False),
    "mixed": (0.3, False, False),
    "wrong": (1.0, False, False),
    "ahead": (0.3, True, False),
    "ahead-sure": (0.3, True, True),
}
"""Which share of proposals is wrong, whether steps are launched ahead, also behind proposals."""


@pytest.fixture(params=slow_but(["mixed", "ahead-sure"], WAYS))
def proposers(request: pytest.FixtureRequest, engine: Engine, plain: Player) -> Iterator[KnowingProposers]:
    wrong, engine.runs_ahead, is_sure = WAYS[request.param]
    answers = {tuple(ids): plain.ids[row] for row, ids in ROW_IDS.items()}
    engine.rows.make_proposer = made = KnowingProposers(answers, wrong, is_sure=is_sure)
    yield made
    engine.rows.make_proposer, engine.runs_ahead = None, False
    assert (max(made.steps) > 1) == (wrong < 1)
    if not wrong:
        assert max(made.steps) == 1 + made.num_speculated


@pytest.mark.usefixtures("proposers")
def test_rows_are_told_what_they_are_told_the_plain_way(engine: Engine, plain: Player) -> None:
    check_ways(partial(play, engine), plain, CHUNKED, SCARCE)


@pytest.mark.parametrize(
    "family", slow_but(["Phi3-longrope"], ["Phi3-longrope", "Bloom", "Gemma2", "gpt-oss", "DeepSeek-V3"])
)
def test_speculation_changes_no_id_of_other_models(family: str, tmp_path: Path) -> None:
    """Attention with windows, soft-caps and ALiBi, and over latents; frequencies that depend on the length,
    for which a row stops.
    """
    tiny_models.save(tmp_path, *FAMILIES[family])
    engine = engine_of(tmp_path, block_size=16)
    plain = play(engine).ids
    proposers = KnowingProposers({tuple(ids): plain[row] for row, ids in ROW_IDS.items()}, 0.3)
    engine.rows.make_proposer = proposers
    assert play(engine).ids == plain
    assert max(proposers.steps) > 1


def test_ids_of_the_small_model_are_those_of_transformers(
    loaded: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answers repeat themselves, so proposals are right."""
    indices = [*FEW[1:4], PROMPTS.index("na " * 40 + "Batman")]
    ids = prompt_ids([PROMPTS[index] for index in indices])
    answers = dict(zip(indices, reference_ids(ids, 40), strict=True))
    played = player(loaded)
    loaded.runs_ahead = False
    monkeypatch.setattr(loaded.rows, "make_proposer", proposer_factory(read_speculation(3, None)))
    played.run([played.start(index, ids[place], 40) for place, index in enumerate(indices)], lead=64)
    assert played.ids == answers
    num_steps = sum(bool(step.num_samples) for step in played.steps)
    assert played.num_proposed and num_steps < 40 + len(indices)


def test_speculate_is_how_many_an_engine_proposes(tmp_path: Path) -> None:
    tiny_models.save(tmp_path, *FAMILIES["Llama"])
    engine = engine_of(tmp_path, speculate=2)
    played = player(engine)
    played.run([played.start(0, [5, 6] * 9, 60, ignore_eos=True)])
    assert max(step.num_samples for step in played.steps) == 3
