"""Beam searches: sequences and scores equal those of transformers' `generate`, however they are batched,
chunked and delayed.
"""

import re
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from api.grammar.compile import Grammar, compile_unchecked
from common.messages.plan import NewRow
from common.messages.records import BeamSequence
from common.messages.request import BeamParams, SamplingParams
from gpu_worker.engine.engine import Engine
from tests.support.engine import reference, tiny_models
from tests.support.engine.batch_player import Player, player
from tests.support.engine.reference import Found
from tests.support.engine.row_steps import plan
from tests.support.engine.tiny_engine import engine_of, prompts
from tests.support.engine.tiny_models import FAMILIES, HYBRIDS, SPEAKING, VOCAB

NEW_TOKENS = 12
EARLY = (False, True, "never")
"""transformers' values of `BeamParams.early_stopping`, in order."""
ENDS = list(range(3, VOCAB, 9))
"""Many ids that end a sequence: a random model seldom chooses a given one."""
SEARCHES = [
    BeamParams(2, 1.0, 0),
    BeamParams(4, 1.0, 0),
    BeamParams(4, 0.0, 1),
    BeamParams(2, 2.0, 2),
    BeamParams(4, -1.0, 2),
    BeamParams(3, 0.6, 1),
]

QUICK = ["Llama", "Granite4"]
"""The second has states: beams take those of their parents."""
SLOW = [
    pytest.param(family, marks=pytest.mark.slow)
    for family in ("DeepSeek-V3", "Llama-dynamic", "Qwen3-MoE", "Gemma2", "GPT2", "gpt-oss")
]


class Tiny:
    """An engine, and transformers' own model."""

    def __init__(self, folder: Path, family: str, **settings: Any) -> None:
        self.model = tiny_models.save(folder, *(FAMILIES | HYBRIDS)[family])
        self.engine = engine_of(folder, **settings)

    def expected(self, prompt: list[int], beams: BeamParams, **arguments: Any) -> list[Found]:
        return reference.beams(
            self.model,
            prompt,
            num_beams=beams.width,
            **{
                "max_new_tokens": NEW_TOKENS,
                "length_penalty": beams.length_penalty,
                "early_stopping": EARLY[beams.early_stopping],
                "eos_token_id": ENDS,
                "pad_token_id": 0,
            }
            | arguments,
        )


def start(played: Player, number: int, prompt: list[int], beams: BeamParams, **params: Any) -> NewRow:
    given: dict[str, Any] = {"stop_ids": ENDS, "ignore_eos": True} | params
    return played.start(number, prompt, NEW_TOKENS, beams=beams, **given)


def check(found: list[BeamSequence], expected: list[Found]) -> None:
    assert [sequence.ids for sequence in found] == [ids for ids, _ in expected]
    assert [sequence.score for sequence in found] == pytest.approx(
        [score for _, score in expected], rel=1e-4, abs=1e-4
    )


def check_all(played: Player, expected: Mapping[int, list[Found]]) -> None:
    assert played.sequences.keys() == expected.keys()
    for number, sequences in expected.items():
        check(played.sequences[number], sequences)
        assert played.ended[number][0] == played.sequences[number][0].reason


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return Tiny(tmp_path_factory.mktemp("llama"), "Llama")


@pytest.mark.parametrize("family", [*QUICK, *SLOW])
def test_sequences_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    """Searches of several prompts and kinds at once, beside plain rows, with prompts in chunks of 7."""
    tiny = Tiny(tmp_path, family)
    cases = dict(enumerate(product(prompts()[1:3], SEARCHES)))
    expected = {number: tiny.expected(*case) for number, case in cases.items()}
    lengths = {len(ids) for sequences in expected.values() for ids, _ in sequences}
    assert NEW_TOKENS in lengths and (len(lengths) > 1 or family == "GPT2")
    plain = player(tiny.engine)
    rows = plain.run([plain.start(90, prompts()[1], 30), plain.start(91, prompts()[2], 30)])
    for prefill_tokens, lead in ((1000, 4), (7, 1)):
        played = player(tiny.engine, prefill_tokens=prefill_tokens)
        beside = [played.start(90, prompts()[1], 30), played.start(91, prompts()[2], 30)]
        searches = [start(played, number, *case) for number, case in cases.items()]
        ids = played.run([beside[0], *searches, beside[1]], lead=lead)
        assert {number: ids[number] for number in rows} == rows
        check_all(played, expected)
        assert len(played.free) == tiny.engine.ready.num_blocks
        slots = tiny.engine.rows.state_slots
        assert not slots or sorted(slots.free) == list(range(1, tiny.engine.ready.max_rows + 1))


def test_searches_beside_others_that_run_ahead(llama: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: the step after one of a search is launched once that one is read."""
    monkeypatch.setattr(llama.engine, "runs_ahead", True)
    prompt, beams = prompts()[2], SEARCHES[1]
    played = player(llama.engine, prefill_tokens=20)
    played.run([played.start(9, prompts()[1], 30), start(played, 1, prompt, beams)], lead=1)
    check_all(played, {1: llama.expected(prompt, beams)})


def test_penalties_bans_and_the_least_length_act_on_each_beam(llama: Tiny) -> None:
    prompt, beams = prompts()[2], BeamParams(4)
    sampling = SamplingParams(
        repetition_penalty=1.4, bad_words=[[7], [30, 40]], logit_bias=[(17, 2.0), (80, -4.0)]
    )
    expected = llama.expected(
        prompt,
        beams,
        repetition_penalty=1.4,
        bad_words_ids=[[7], [30, 40]],
        sequence_bias=[[[17], 2.0], [[80], -4.0]],
        min_new_tokens=5,
    )
    assert expected != llama.expected(prompt, beams)
    assert min(len(ids) for ids, _ in expected) > 5
    played = player(llama.engine)
    played.run([start(played, 1, prompt, beams, sampling=sampling, min_new_tokens=5)])
    check_all(played, {1: expected})


def test_a_search_behind_cached_blocks_and_the_prompts_log_probabilities(tmp_path: Path) -> None:
    tiny = Tiny(tmp_path, "Llama", block_size=16)
    prompt, beams = prompts()[3], SEARCHES[1]
    played = player(tiny.engine)
    played.kept = set(played.free)
    played.run([start(played, 1, prompt, beams, prompt_logprobs=0)])
    params: dict[str, Any] = {"beams": beams, "stop_ids": ENDS, "ignore_eos": True}
    played.run([played.start_after(1, 2, prompt, NEW_TOKENS, **params)])
    assert played.steps[-1].released and len(played.prompt_logprobs[1]) == len(prompt) - 1
    check_all(played, dict.fromkeys((1, 2), tiny.expected(prompt, beams)))


def test_a_search_that_is_stopped_gives_its_blocks_back_and_finds_the_same_again(llama: Tiny) -> None:
    prompt, beams = prompts()[2], SEARCHES[1]
    for num_steps in range(5):
        played = player(llama.engine)
        row = start(played, 1, prompt, beams)
        llama.engine.apply(plan(llama.engine.rows.step + 100, 1000, [row]))
        llama.engine.apply(plan(llama.engine.rows.step + 100, 1000, blocks=played.grow(NEW_TOKENS, 1)))
        steps = [llama.engine.step() for _ in range(num_steps)]
        assert all(step and not step.sequences for step in steps)
        llama.engine.apply(plan(llama.engine.rows.step, 0, stops=[(1, "preempted")]))
        step = llama.engine.step()
        assert step and [why for _, why, _ in step.ended] == ["preempted"] and len(step.released) == 1
        assert llama.engine.step() is None
    played = player(llama.engine)
    played.run([start(played, 1, prompt, beams)])
    check_all(played, {1: llama.expected(prompt, beams)})


def test_a_search_with_allowed_ids_ends_when_none_is_left(llama: Tiny) -> None:
    """Each beam keeps to the ids that are allowed; if these are outside the vocabulary, the request fails."""
    played = player(llama.engine)
    few = SamplingParams(allowed_token_ids=[20, 21, 22])
    none = SamplingParams(allowed_token_ids=[VOCAB + 7])
    played.run(
        [
            start(played, 1, prompts()[1], BeamParams(4), sampling=few),
            start(played, 2, prompts()[1], BeamParams(4), sampling=none),
        ]
    )
    assert len(played.sequences[1]) == 4
    assert all(set(sequence.ids) <= {20, 21, 22} for sequence in played.sequences[1])
    assert played.ended[2][0] == "grammar" and not played.sequences[2]


@pytest.fixture(scope="module")
def speaking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Tokenizer]]:
    """A tiny model with a real tokenizer."""
    folder = tmp_path_factory.mktemp("speaking")
    engine = engine_of(tiny_models.save_with_tokenizer(folder, "Llama", SPEAKING))
    engine.matchers.waits = True
    yield engine, Tokenizer.from_file(str(folder / "tokenizer.json"))


def find(engine: Engine, end: int, **params: Any) -> Player:
    played = player(engine)
    played.run([played.start(1, prompts()[1], end, beams=BeamParams(4), **params)])
    return played


def test_a_grammar_holds_for_each_beam(speaking: tuple[Engine, Tokenizer]) -> None:
    engine, tokenizer = speaking
    source = compile_unchecked(Grammar("regex", "(cat|dog|bird|fish)s?", "f"))
    found = find(engine, 20, sampling=SamplingParams(grammar=source)).sequences[1]
    texts = [tokenizer.decode(sequence.ids, skip_special_tokens=True) for sequence in found]
    assert len(texts) == 4 and all(re.fullmatch("(cat|dog|bird|fish)s?", text) for text in texts)
    assert {sequence.reason for sequence in found} == {"eos_token"}


def test_stop_strings_end_each_beam(speaking: tuple[Engine, Tokenizer]) -> None:
    """No sequence goes on after one, and none is found in the first tokens."""
    engine, tokenizer = speaking
    plain = find(engine, 12, ignore_eos=True).sequences[1]
    text = tokenizer.decode(plain[0].ids[4:8])
    letter = next(character for character in text if character.isalpha())
    for min_new_tokens in (0, 6):
        played = find(engine, 12, ignore_eos=True, stop=[letter], min_new_tokens=min_new_tokens)
        found = played.sequences[1]
        assert "stop_sequence" in {sequence.reason for sequence in found}
        for sequence in found:
            free, last = sequence.ids[:-1][min_new_tokens:], sequence.ids[-1]
            assert not any(letter in tokenizer.decode([token]) for token in free)
            assert (letter in tokenizer.decode([last])) == (sequence.reason == "stop_sequence")
            assert len(sequence.ids) > min_new_tokens
