"""Rows with a grammar: their texts satisfy it, however they are batched and resumed, and other rows do not
notice.
"""

import json
from typing import Any

import jsonschema
import pytest
from tokenizers import Tokenizer

from api.grammar.compile import Grammar, compile_unchecked
from common import model_files
from common.messages.request import SamplingParams
from gpu_worker.engine.engine import Engine
from tests.support.engine.batch_player import Player
from tests.support.engine.reference import prompt_ids, reference_ids
from tests.support.prompts import FEW, PROMPTS
from tests.support.runahead.each_way import AHEAD

MAX_TOKENS = 120
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "kind": {"enum": ["cat", "dog", "été"]},
        "age": {"type": "integer", "minimum": 3, "maximum": 120},
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{2,4}$"}, "maxItems": 2},
        "owner": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/owner"}]},
    },
    "required": ["name", "kind", "age", "tags", "owner"],
    "additionalProperties": False,
    "$defs": {"owner": {"type": "object", "properties": {"id": {"type": "boolean"}}, "required": ["id"]}},
}
SHORT_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {name: SCHEMA["properties"][name] for name in ("name", "age")},
    "required": ["name", "age"],
    "additionalProperties": False,
}
JSON = compile_unchecked(Grammar("json", json.dumps(SCHEMA), "f"))
SHORT = compile_unchecked(Grammar("json", json.dumps(SHORT_SCHEMA), "f"))
REGEX = compile_unchecked(Grammar("regex", r"[0-9]{2}-[a-f]{3}", "f"))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(model_files.resolve("smollm2") / "tokenizer.json"))


@pytest.fixture
def player(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Player:
    """Plays an engine that compiles a row's grammar before the row starts."""
    monkeypatch.setattr(engine.matchers, "waits", True)
    assert not engine.rows.rows
    return Player(engine, list(range(1, 1 + engine.ready.num_blocks)), until=engine.rows.step)


def grammar(source: str, **params: Any) -> SamplingParams:
    return SamplingParams(grammar=source, **params)


HOT = {"temperature": 1.4, "seed": 7, "top_p": 0.95, "frequency_penalty": 0.3}
EACH_WAY = pytest.mark.parametrize(
    ("engine", "params"),
    [
        pytest.param(False, {}, id="greedy"),
        pytest.param(True, HOT, id="ahead-hot"),
        pytest.param(True, {}, id="ahead-greedy", marks=pytest.mark.slow),
        pytest.param(False, HOT, id="hot", marks=pytest.mark.slow),
    ],
    indirect=["engine"],
)


@AHEAD
def test_every_row_satisfies_its_own_grammar_beside_rows_without_one(
    player: Player, tokenizer: Tokenizer
) -> None:
    prompts = prompt_ids([PROMPTS[index] for index in FEW])
    sampling = [grammar(JSON), grammar(JSON, **HOT), grammar(REGEX), grammar(REGEX, temperature=2.0, seed=1)]
    starts = [
        player.start(row, prompts[row % len(prompts)], MAX_TOKENS, sampling=params)
        for row, params in enumerate(sampling)
    ]
    starts.append(player.start(9, prompts[0], 30))
    ids = player.run(starts)
    texts = [tokenizer.decode(ids[row]) for row in range(len(sampling))]
    assert [player.ended[row][0] for row in range(len(sampling))] == ["eos_token"] * len(sampling), texts
    for text in texts[:2]:
        jsonschema.validate(json.loads(text), SCHEMA)
    for text in texts[2:]:
        assert len(text) == 6 and text[:2].isdigit() and set(text[3:]) <= set("abcdef")
    assert ids[9] == reference_ids([prompts[0]], 30)[0]


@pytest.mark.slow
@EACH_WAY
def test_a_resumed_row_gives_the_ids_of_an_undisturbed_one(player: Player, params: dict[str, Any]) -> None:
    [prompt] = prompt_ids([PROMPTS[FEW[0]]])
    sampling = grammar(SHORT, **params)
    whole = player.run([player.start(0, prompt, MAX_TOKENS, sampling=sampling)])[0]
    bases = (1, len(whole) // 2, len(whole) - 1)
    starts = [
        player.start(row, [*prompt, *whole[:base]], MAX_TOKENS, base, sampling=sampling)
        for row, base in enumerate(bases, start=1)
    ]
    ids = player.run(starts)
    assert [ids[start.row] for start in starts] == [whole[base:] for base in bases]


def test_a_row_ends_with_its_grammar_whatever_else_it_asks_for(player: Player, tokenizer: Tokenizer) -> None:
    [prompt] = prompt_ids([PROMPTS[FEW[0]]])
    start = player.start(0, prompt, 40, sampling=grammar(REGEX), min_new_tokens=30, ignore_eos=True)
    text = tokenizer.decode(player.run([start])[0])
    assert player.ended[0][0] == "eos_token" and len(text) == 6


def test_max_tokens_cuts_a_row_before_its_grammar_ends(player: Player) -> None:
    [prompt] = prompt_ids([PROMPTS[FEW[0]]])
    player.run([player.start(0, prompt, 3, sampling=grammar(JSON))])
    assert player.ended[0] == ("length", 3)


def test_a_row_whose_grammar_allows_no_token_fails_alone(player: Player) -> None:
    prompts = prompt_ids([PROMPTS[index] for index in FEW[:2]])
    starts = [
        player.start(0, prompts[0], 20, sampling=grammar("this is no grammar")),
        player.start(1, prompts[1], 20),
    ]
    ids = player.run(starts)
    assert player.ended[0] == ("grammar", 0) and ids[0] == []
    assert ids[1] == reference_ids([prompts[1]], 20)[0]


@pytest.mark.slow
@pytest.mark.parametrize("pattern", [r"(a?){300}a{300}", r"((\w+\s?){1,2000}\.)+"], ids=["token", "mask"])
def test_a_row_whose_grammar_proves_too_complex_fails_alone_and_says_so(player: Player, pattern: str) -> None:
    """Where a mask takes too much work, llguidance allows the end of the text alone, valid or not."""
    prompts = prompt_ids([PROMPTS[index] for index in FEW[:2]])
    sampling = grammar(compile_unchecked(Grammar("regex", pattern, "f")), temperature=2.0, seed=1)
    starts = [player.start(0, prompts[0], 60, sampling=sampling), player.start(1, prompts[1], 20)]
    ids = player.run(starts)
    assert player.ended[0][0] == "grammar_limit"
    assert ids[1] == reference_ids([prompts[1]], 20)[0]
