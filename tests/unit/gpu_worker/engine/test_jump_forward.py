"""Jump-forward: what a grammar forces comes in one step, and no token differs from the plain way."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from api.grammar.compile import Grammar, compile_unchecked
from common.messages.request import SamplingParams
from gpu_worker.engine.engine import Engine
from tests.support.engine.batch_player import Player
from tests.support.engine.reference import prompt_ids
from tests.support.prompts import FEW, PROMPTS

MAX_TOKENS = 30
SCHEMA = {
    "type": "object",
    "properties": {
        "identification": {"type": "integer", "maximum": 99},
        "kind": {"const": "a quiet harbour, an old library"},
        "notes": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["identification", "kind", "notes"],
}
SENTENCE = compile_unchecked(
    Grammar("regex", r"The quick brown fox jumps over the lazy dog and [a-z]{3,9}\.", "f")
)
OBJECT = compile_unchecked(Grammar("json", json.dumps(SCHEMA), "f"))
HOT = SamplingParams(temperature=1.4, seed=7, top_p=0.95, frequency_penalty=0.3, raw_logprobs=True)
SAMPLING = [
    replace(params, grammar=source) for source in (SENTENCE, OBJECT) for params in (SamplingParams(), HOT)
]
Told = tuple[dict[int, list[int]], dict[Any, dict[int, float]], dict[int, tuple[str, int]]]


@pytest.fixture
def engine(loaded: Engine, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """An engine that compiles a row's grammar before the row starts."""
    monkeypatch.setattr(loaded.matchers, "waits", True)
    monkeypatch.setattr(loaded, "runs_ahead", False)
    return loaded


def play(
    engine: Engine,
    rows: Sequence[SamplingParams | None],
    shown: dict[int, list[int]] | None = None,
    **run: Any,
) -> Told:
    """Ids, the likeliest tokens and ends of rows behind what was `shown` of them."""
    shown = shown or {}
    played = Player(engine, list(range(1, 1 + engine.ready.num_blocks)), until=engine.rows.step)
    prompts = prompt_ids([PROMPTS[index] for index in FEW[:2]])
    starts = [
        played.start(
            row,
            prompts[row % 2] + shown.get(row, []),
            MAX_TOKENS,
            len(shown.get(row, [])),
            sampling=sampling,
            top_n_tokens=2 * (row % 2),
        )
        for row, sampling in enumerate(rows)
    ]
    played.run(starts, **run)
    return played.ids, played.top_logprobs, played.ended


@pytest.mark.slow
def test_tokens_are_those_of_the_plain_way(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-probabilities and ends, too; also of rows that resume within what is forced, or get few blocks, and
    where steps are launched ahead.
    """
    sampling = [*SAMPLING, None]
    with monkeypatch.context() as patch:
        patch.setattr(engine.rows, "make_proposer", None)
        ids, tops, ended = play(engine, sampling)
    assert play(engine, sampling) == (ids, tops, ended)
    assert play(engine, sampling, lead=1, horizon=2) == (ids, tops, ended)
    shown = {row: tokens[: 3 + row] for row, tokens in ids.items()}
    resumed = play(engine, sampling, shown)[0]
    assert {row: shown[row] + tokens for row, tokens in resumed.items()} == ids
    monkeypatch.setattr(engine, "runs_ahead", True)
    assert play(engine, sampling) == (ids, tops, ended)


@pytest.mark.parametrize("ahead", [False, True])
def test_forced_tokens_come_in_one_step(engine: Engine, ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "runs_ahead", ahead)
    [prompt] = prompt_ids([PROMPTS[FEW[0]]])
    played = Player(engine, list(range(1, 1 + engine.ready.num_blocks)), until=engine.rows.step)
    played.run([played.start(0, prompt, MAX_TOKENS, sampling=SAMPLING[0])])
    counts = [step.num_samples for step in played.steps if step.num_samples]
    assert max(counts) >= 9 and sum(counts) == len(played.ids[0])
