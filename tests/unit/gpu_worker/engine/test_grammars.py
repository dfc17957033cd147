"""Rows with a grammar: texts satisfy it, however they are batched and resumed, and forced
tokens come in one step.
"""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from tokenizers import Tokenizer

from api.grammar.compile import Grammar, compile_unchecked
from common import model_files
from common.messages.request import SamplingParams
from gpu_worker.engine.engine import Engine
from tests.support.engine import tiny_models
from tests.support.engine.batch_player import AHEAD, Player, player
from tests.support.engine.reference import prompt_ids, reference_ids
from tests.support.engine.tiny_engine import BATCHED, check_ways, engine_of, play_rows
from tests.support.prompts import FEW, PROMPTS

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


@pytest.fixture(autouse=True)
def waits(loaded: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row's grammar is compiled before the row starts."""
    monkeypatch.setattr(loaded.matchers, "waits", True)


@pytest.fixture
def guided(engine: Engine) -> Player:
    return player(engine)


def grammar(source: str, **params: Any) -> SamplingParams:
    return SamplingParams(grammar=source, **params)


HOT = SamplingParams(temperature=1.4, seed=4, top_p=0.95, frequency_penalty=0.3, raw_logprobs=True)


@AHEAD
def test_every_row_satisfies_its_own_grammar_beside_rows_without_one(
    guided: Player, tokenizer: Tokenizer
) -> None:
    prompts = prompt_ids([PROMPTS[index] for index in FEW])
    sampling = [
        grammar(SHORT),
        replace(HOT, grammar=JSON),
        grammar(REGEX),
        grammar(REGEX, temperature=2.0, seed=1),
    ]
    starts = [
        guided.start(row, prompts[row % len(prompts)], MAX_TOKENS, sampling=params)
        for row, params in enumerate(sampling)
    ]
    starts.append(guided.start(9, prompts[0], 30))
    ids = guided.run(starts)
    texts = [tokenizer.decode(ids[row]) for row in range(len(sampling))]
    assert [guided.ended[row][0] for row in range(len(sampling))] == ["eos_token"] * len(sampling), texts
    for text, schema in zip(texts, (SHORT_SCHEMA, SCHEMA), strict=False):
        jsonschema.validate(json.loads(text), schema)
    for text in texts[2:]:
        assert len(text) == 6 and text[:2].isdigit() and set(text[3:]) <= set("abcdef")
    assert ids[9] == reference_ids([prompts[0]], 30)[0]


def test_a_row_ends_with_its_grammar_whatever_else_it_asks_for(guided: Player, tokenizer: Tokenizer) -> None:
    [prompt] = prompt_ids([PROMPTS[FEW[0]]])
    start = guided.start(0, prompt, 40, sampling=grammar(REGEX), min_new_tokens=30, ignore_eos=True)
    text = tokenizer.decode(guided.run([start])[0])
    assert guided.ended[0][0] == "eos_token" and len(text) == 6


def test_max_tokens_cuts_a_row_before_its_grammar_ends(guided: Player) -> None:
    [prompt] = prompt_ids([PROMPTS[FEW[0]]])
    guided.run([guided.start(0, prompt, 3, sampling=grammar(JSON))])
    assert guided.ended[0] == ("length", 3)


def test_a_row_whose_grammar_allows_no_token_fails_alone(guided: Player) -> None:
    prompts = prompt_ids([PROMPTS[index] for index in FEW[:2]])
    starts = [
        guided.start(0, prompts[0], 20, sampling=grammar("this is no grammar")),
        guided.start(1, prompts[1], 20),
    ]
    ids = guided.run(starts)
    assert guided.ended[0] == ("grammar", 0) and ids[0] == []
    assert ids[1] == reference_ids([prompts[1]], 20)[0]


@pytest.mark.slow
@pytest.mark.parametrize("pattern", [r"(a?){300}a{300}", r"((\w+\s?){1,2000}\.)+"], ids=["token", "mask"])
def test_a_row_whose_grammar_proves_too_complex_fails_alone_and_says_so(guided: Player, pattern: str) -> None:
    """Where a mask takes too much work, llguidance allows the end of the text alone, valid or not."""
    prompts = prompt_ids([PROMPTS[index] for index in FEW[:2]])
    sampling = grammar(compile_unchecked(Grammar("regex", pattern, "f")), temperature=2.0, seed=1)
    starts = [guided.start(0, prompts[0], 60, sampling=sampling), guided.start(1, prompts[1], 20)]
    ids = guided.run(starts)
    assert guided.ended[0][0] == "grammar_limit"
    assert ids[1] == reference_ids([prompts[1]], 20)[0]


MAX_FORCED = 30
FORCED_SCHEMA = {
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
OBJECT = compile_unchecked(Grammar("json", json.dumps(FORCED_SCHEMA), "f"))
SAMPLING = [replace(one, grammar=source) for source in (SENTENCE, OBJECT) for one in (SamplingParams(), HOT)]


def play(engine: Engine, **how: Any) -> Player:
    texts = prompt_ids([PROMPTS[index] for index in FEW[:2]])
    rows = {row: texts[row % 2] for row in range(len(SAMPLING) + 1)}
    params = {row: {"sampling": one, "top_n_tokens": 2 * (row % 2)} for row, one in enumerate(SAMPLING)}
    return play_rows(engine, rows, new_tokens=MAX_FORCED, params=params, ignore_eos=False, **how)


@pytest.mark.slow
def test_tokens_are_those_of_the_plain_way(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-probabilities and ends, too; also of rows that resume within what is forced, or get few blocks, and
    where steps are launched ahead.
    """
    with monkeypatch.context() as patch:
        patch.setattr(engine.rows, "make_proposer", None)
        plain = play(engine)
    check_ways(partial(play, engine), plain, BATCHED, {"lead": 1, "horizon": 2})
    monkeypatch.setattr(engine, "runs_ahead", True)
    assert play(engine).answer == plain.answer


def test_forced_tokens_come_in_one_step(engine: Engine) -> None:
    [prompt] = prompt_ids([PROMPTS[FEW[0]]])
    played = player(engine)
    played.run([played.start(0, prompt, MAX_FORCED, sampling=SAMPLING[0])])
    counts = [step.num_samples for step in played.steps if step.num_samples]
    assert max(counts) >= 9 and sum(counts) == len(played.ids[0])


NUM_TOKENS = 259
"""Of the tokenizer of bytes, whose last token is an empty line."""


@pytest.mark.parametrize("missing", [0, 1, 40])
def test_tokens_that_the_model_lacks_are_never_sampled(missing: int, tmp_path: Path) -> None:
    """A tokenizer may have more tokens than the model: the text is written in others."""
    text, sizes = "a\n\nb", tiny_models.LLAMA | {"vocab_size": NUM_TOKENS - missing, "eos_token_id": 1}
    engine = engine_of(tiny_models.save_with_bytes(tmp_path, "Llama", sizes))
    engine.matchers.waits, guided = True, player(engine)
    sampling = grammar(compile_unchecked(Grammar("choice", json.dumps([text]), "f")), temperature=1.0, seed=1)
    ids = guided.run([guided.start(row, [5, 6], 20, sampling=sampling) for row in range(2)])
    assert max(ids[0]) < NUM_TOKENS - missing and guided.ended[0][0] == "eos_token"
    assert Tokenizer.from_file(str(tmp_path / "tokenizer.json")).decode(ids[0][:-1]) == text


def test_where_the_tokenizer_cannot_be_read_a_row_with_a_grammar_fails_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Fresh or resumed. It is read once."""
    tiny_models.save(tmp_path, "Llama", tiny_models.LLAMA)
    engine = engine_of(tmp_path)
    engine.prepare()
    engine.matchers.waits, guided, prompt = True, player(engine), [5, 6, 7]
    starts = [guided.start(row, [*prompt, *range(row)], 9, row, sampling=grammar(REGEX)) for row in range(2)]
    ids = guided.run([*starts, guided.start(2, prompt, 9, ignore_eos=True)])
    assert [guided.ended[row] for row in range(3)] == [("grammar", 0), ("grammar", 1), ("length", 9)]
    assert len(ids[2]) == 9 and caplog.text.count("llguidance cannot read") == 1
