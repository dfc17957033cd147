"""Proposers: guesses as far as they pay; with a grammar, none that it forbids."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from common.settings.speculation import read_speculation
from gpu_worker.engine.batch.proposer import ForcedProposer
from gpu_worker.engine.drafting.proposers import (
    GuessProposer,
    GuidedProposer,
    NgramGuesser,
    guessing_factory,
    make_proposer,
)
from tests.support.engine.fixed_grammar import FixedGrammar

IDS = np.array([5, 6, 9, 8, 7, 4, 5, 6], np.int32)


@dataclass
class Forcing(FixedGrammar):
    """Forces some tokens, and allows some."""

    forces: list[int] = field(default_factory=list)
    allows: int = 0

    def forced(self, most: int) -> list[int]:
        return self.forces[:most]

    def num_allowed(self, tokens: Sequence[int]) -> int:
        return min(len(tokens), self.allows)


def test_tokens_after_those_of_the_step_in_flight_are_proposed() -> None:
    proposer = GuessProposer(3, NgramGuesser(IDS))
    assert proposer.propose(99) == [9, 8, 7] and proposer.propose(2) == [9, 8]
    assert proposer.propose(2, skipped=2) == [7, 4]


def test_a_grammar_forces_tokens_or_cuts_guesses() -> None:
    grammar = Forcing(None, forces=[1, 2], allows=2)
    proposer = GuidedProposer(grammar, GuessProposer(3, NgramGuesser(IDS)))
    assert (proposer.propose(9), proposer.is_sure, proposer.method) == ([1, 2], True, "grammar")
    grammar.forces = []
    assert (proposer.propose(9), proposer.is_sure, proposer.method) == ([9, 8], False, "ngram")
    grammar.allows = 0
    assert proposer.propose(9) == []


def test_forced_tokens_say_nothing_of_guesses() -> None:
    grammar = Forcing(None, forces=[1], allows=9)
    guessing = GuessProposer(3, NgramGuesser(IDS))
    proposer = GuidedProposer(grammar, guessing)
    proposer.propose(9)
    proposer.learn([1, 9], 1)
    assert guessing.acceptance.proposed == 0 and guessing.guesser.text.length == len(IDS) + 2  # type: ignore[attr-defined]
    grammar.forces = []
    proposer.propose(9)
    proposer.learn([9], 3)
    assert guessing.acceptance.proposed == 3


def test_what_proposes_is_what_the_settings_say() -> None:
    grammar = Forcing(None)
    none = guessing_factory(read_speculation(0, None))
    assert make_proposer(none, IDS, None) is None
    assert isinstance(make_proposer(none, IDS, grammar), ForcedProposer)
    for config, method in ((None, "ngram"), ('{"method": "suffix"}', "suffix")):
        guessing = guessing_factory(read_speculation(3, config))
        proposer = make_proposer(guessing, IDS, None)
        assert proposer and proposer.method == method
        assert isinstance(make_proposer(guessing, IDS, grammar), GuidedProposer)
