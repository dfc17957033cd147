"""A draft model: ids are those of the plain way whatever it proposes, and of a model that equals the target
nearly all proposals are right; with a grammar, too.
"""

import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from api.grammar.compile import Grammar, compile_unchecked
from common.messages.request import SamplingParams
from common.settings.settings import SettingError
from gpu_worker.engine.drafting.proposers import Proposer
from gpu_worker.engine.engine import Engine
from tests.support.engine import tiny_models
from tests.support.engine.batch_player import Player, player
from tests.support.engine.tiny_engine import prompts
from tests.support.engine.tiny_models import FAMILIES, LLAMA
from tests.support.parameters.slow_but import slow_but
from tests.support.speculation.drafts import (
    NEW_TOKENS,
    NUM_DRAFTED,
    ROWS,
    Drafted,
    drafting_engine,
    play_rows,
)

OTHER = LLAMA | {"num_hidden_layers": 1, "num_key_value_heads": 1, "hidden_size": 32}
"""Another model with the same vocabulary: its proposals are wrong."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    model = tiny_models.save(folder, *FAMILIES["Llama"])
    expected = [tiny_models.generate(model, prompt, NEW_TOKENS) for prompt in prompts()]
    (folder / "expected.json").write_text(json.dumps(expected))
    return folder


@pytest.fixture(scope="module")
def plain(folder: Path) -> Drafted:
    return play_rows(drafting_engine(folder, None))


@pytest.fixture(scope="module")
def equal(folder: Path) -> Engine:
    return drafting_engine(folder, {"model": str(folder), "num_speculative_tokens": NUM_DRAFTED})


@pytest.fixture(scope="module")
def other(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    draft = tmp_path_factory.mktemp("draft")
    tiny_models.save(draft, "Llama", OTHER)
    return drafting_engine(folder, {"model": str(draft), "num_speculative_tokens": NUM_DRAFTED})


@pytest.fixture(params=["equal", "other"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    engine: Engine = request.getfixturevalue(request.param)
    yield engine
    engine.runs_ahead = False


def test_ids_are_those_of_the_plain_way(engine: Engine, plain: Drafted) -> None:
    """Batched, in chunks, with few blocks, where steps may be launched ahead, and resumed."""
    assert play_rows(engine).answer == plain.answer
    assert play_rows(engine, prefill_tokens=7, lead=1, horizon=2).answer == plain.answer
    assert play_rows(engine, num_blocks=2 * len(ROWS) + 8, lead=1, served=1).answer == plain.answer
    engine.runs_ahead = True
    assert play_rows(engine).answer == plain.answer
    shown = {row: ids[: 5 + 4 * row] for row, ids in plain.ids.items()}
    resumed = play_rows(engine, shown).ids
    assert {row: shown[row] + ids for row, ids in resumed.items()} == plain.ids


@pytest.mark.parametrize(
    "way", slow_but(["chunked", "resumed"], ["batched", "chunked", "ahead", "resumed", "scarce"])
)
def test_an_equal_model_is_nearly_always_right(equal: Engine, plain: Drafted, way: str) -> None:
    """Greedy and sampled, with penalties, too. A few proposals go beyond the end of their answer."""
    equal.runs_ahead = way == "ahead"
    shown = {row: ids[:9] for row, ids in plain.ids.items()} if way == "resumed" else None
    lead, horizon = (6, 2) if way == "scarce" else (64, 4)
    prefill_tokens = 7 if way == "chunked" else 1000
    played = play_rows(equal, shown, prefill_tokens, lead=lead, horizon=horizon)
    equal.runs_ahead = False
    assert played.num_proposed > 60 and played.share_right > 0.97
    assert played.num_steps <= sum(map(len, played.ids.values())) / (2 if way == "scarce" else 3)


def second_turn(engine: Engine, plain: Drafted) -> tuple[Drafted, Drafted]:
    """Answers to rows that start with blocks of others, and to the same rows without them."""
    free = list(range(1, 1 + engine.ready.num_blocks))
    played = Player(engine, free, until=engine.rows.step, kept=set(free))
    rows = [2, 3]
    first = [played.start(row, prompts()[row], NEW_TOKENS, ignore_eos=True) for row in rows]
    tables = {row: played.rows[row].blocks for row in rows}
    answers = {row: list(ids) for row, ids in played.run(first).items()}
    done = len(played.steps)
    turns = {row: [*prompts()[row], *answers[row], 5] for row in rows}
    cached = {row: tables[row][: (len(ids) - 1) // engine.block_size] for row, ids in turns.items()}
    played.run(
        [
            played.start_behind(cached[row], 100 + row, ids, NEW_TOKENS, ignore_eos=True)
            for row, ids in turns.items()
        ],
        lead=64,
    )
    steps = played.steps[done:]
    num_steps = sum(len({row for row, *_ in step.sampled}) for step in steps)
    found = {row: played.ids[100 + row] for row in rows}
    anew = player(engine)
    ids = anew.run([anew.start(row, turns[row], NEW_TOKENS, ignore_eos=True) for row in rows])
    return Drafted(found, {}, num_steps, sum(step.proposed_tokens for step in steps)), Drafted(ids)


@pytest.mark.parametrize("paused", [pytest.param(False, marks=pytest.mark.slow), True])
def test_rows_that_start_with_blocks_of_others_draft_as_well(
    equal: Engine, plain: Drafted, paused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the rows before them did not draft, so that their blocks have no K and V of the draft."""
    monkeypatch.setattr(equal.rows, "prefix_caching", True)
    if paused:
        pause_first_rows(equal, monkeypatch)
    behind, anew = second_turn(equal, plain)
    assert behind.ids == anew.ids
    assert behind.num_proposed > 30 and behind.share_right > 0.9


def pause_first_rows(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first two rows that start propose nothing."""
    make, numbers = engine.rows.make_proposer, count()
    assert make

    def paused(*arguments: Any) -> Proposer | None:
        proposer = make(*arguments)
        assert proposer
        proposer.acceptance.pause = 2 * NEW_TOKENS if next(numbers) < 2 else 0
        return proposer

    monkeypatch.setattr(engine.rows, "make_proposer", paused)


def test_a_row_whose_drafts_do_not_pay_pauses(other: Engine) -> None:
    other.costs.set(1.0, 0.3, 0.1, 0.0)
    played = play_rows(other, new_tokens=100)
    assert played.num_proposed < sum(map(len, played.ids.values())) / 2


def test_it_drafts_again_after_a_sleep(equal: Engine, plain: Drafted) -> None:
    equal.sleep()
    equal.wake_up(lambda _: None)
    played = play_rows(equal, lead=64)
    assert played.answer == plain.answer and played.share_right > 0.97


def test_a_draft_model_that_cannot_serve_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    def refusal(config: dict[str, object]) -> str:
        with pytest.raises(SettingError) as error:
            drafting_engine(folder, {"num_speculative_tokens": 2} | config)
        assert error.value.name == "speculative_config"
        return error.value.cause

    (tmp_path / "small").mkdir()
    tiny_models.save(tmp_path / "small", "Llama", OTHER | {"vocab_size": 400})
    assert "its vocabulary has 400 tokens, and 500" in refusal({"model": str(tmp_path / "small")})
    (tmp_path / "damaged").mkdir()
    tiny_models.save(tmp_path / "damaged", "Llama", OTHER)
    weights = tmp_path / "damaged" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert "model.safetensors is damaged" in refusal({"model": str(tmp_path / "damaged")})
    assert "does not exist" in refusal({"model": str(tmp_path / "missing")})


WORDS = compile_unchecked(Grammar("regex", r'\{"name": "[a-z ]{60,90}"\}', "f"))
HOT = SamplingParams(temperature=1.3, seed=5, grammar=WORDS)
GUIDED: dict[int, SamplingParams | None] = {0: SamplingParams(grammar=WORDS), 1: HOT, 2: HOT, 3: None}


def play_guided(engine: Engine, **run: Any) -> Drafted:
    engine.matchers.waits = True
    return play_rows(engine, rows=GUIDED, lead=64, **run)


@pytest.fixture(scope="module")
def speaking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = tiny_models.LLAMA | {"vocab_size": 49_152, "eos_token_id": 2, "tie_word_embeddings": True}
    return tiny_models.save_with_tokenizer(tmp_path_factory.mktemp("model"), "Llama", sizes)


@pytest.fixture(scope="module")
def plain_words(speaking: Path) -> Drafted:
    engine = drafting_engine(speaking, None)
    engine.rows.make_proposer = None
    return play_guided(engine)


@pytest.mark.parametrize(
    ("config", "is_right"),
    [
        ({"model": ""}, True),
        pytest.param({"method": "ngram"}, False, marks=pytest.mark.slow),
        pytest.param({"method": "suffix"}, False, marks=pytest.mark.slow),
    ],
)
def test_rows_with_a_grammar_have_the_ids_of_the_plain_way(
    speaking: Path, plain_words: Drafted, config: dict[str, Any], is_right: bool
) -> None:
    """An equal model is nearly always right: its drafts are masked, too. Guesses are cut."""
    if "model" in config:
        config = {"model": str(speaking)}
    engine = drafting_engine(speaking, config | {"num_speculative_tokens": 4})
    drafted = play_guided(engine)
    assert drafted.answer == plain_words.answer
    assert drafted.num_proposed > 0
    if is_right:
        assert drafted.share_right > 0.95
        assert drafted.num_steps < plain_words.num_steps / 2
    shown = {row: ids[: 7 + row] for row, ids in plain_words.ids.items()}
    resumed = play_guided(engine, shown=shown).ids
    assert {row: shown[row] + ids for row, ids in resumed.items()} == plain_words.ids
