"""Beam search: which continuations of a group's beams go on, which sequences end, and when the search ends.
No tensors, no blocks.

The rules are those of transformers' `GenerationMixin._beam_search` for a batch of one. Where several
continuations of one step end, transformers keeps as many candidates as are needed to go on with `width`
beams; so does `num_candidates`.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from common.messages.records import BeamSequence
from common.messages.request import BeamParams
from gpu_worker.engine.batch.beam_text import BeamText
from gpu_worker.engine.batch.sampling_state import SamplingState

AT_FULL, NEVER = 1, 2
"""Values of `BeamParams.early_stopping`."""
LARGEST = float(np.finfo(np.float32).max)


class Candidate(NamedTuple):
    """A beam and a token that may continue it.

    Attributes:
        parent: place of the beam.
        logprob: of the token, after penalties.
        total: the sum of all log-probabilities up to the token.
    """

    parent: int
    token: int
    logprob: float
    total: float


class BeamToken(NamedTuple):
    """A generated token, and the one before it; None before the first. Beams share what they have in
    common.
    """

    previous: "BeamToken | None"
    token: int
    logprob: float


@dataclass(slots=True, eq=False)
class Beam:
    """One open sequence.

    Attributes:
        parent: the place of the beam, one step ago, that it continues.
        total: the sum of its log-probabilities.
        text: None without stop strings.
    """

    parent: int = 0
    last: BeamToken | None = None
    total: float = 0.0
    state: SamplingState | None = None
    text: BeamText | None = None


@dataclass(slots=True, eq=False)
class BeamSearch:
    """The search of one request.

    Attributes:
        ends: ids that end a sequence → the reason.
        beams: the open sequences, all of the same length. At first there is one, without tokens.
        length: tokens of each open sequence.
        finished: the best sequences that have ended, at most `width`, the best first.
        failure: why the last beam that died did so.
        is_over: no better sequence will come.
    """

    params: BeamParams
    max_new_tokens: int
    ends: Mapping[int, str]
    beams: list[Beam]
    length: int = 0
    finished: list[BeamSequence] = field(default_factory=list)
    failure: str = "grammar"
    is_over: bool = False

    @property
    def num_candidates(self) -> int:
        """How many of the best continuations of all beams a step needs: each beam can end with each of the
        ids in `ends`, and `width` others are needed to go on.
        """
        return max(2, 1 + len(self.ends)) * self.params.width

    @property
    def totals(self) -> list[float]:
        return [beam.total for beam in self.beams]

    @property
    def finish_reason(self) -> str | None:
        """Why the request ends: the reason of the best sequence; None while the search goes on."""
        if not self.is_over:
            return None
        return self.finished[0].reason if self.finished else self.failure

    def advance(self, candidates: Iterable[Candidate]) -> None:
        """Take the best continuations of all beams, the best first.

        Of the first `width`, those that end are sequences; those that do not end, up to `width`, go on. One
        whose total is -inf, or no number, is no continuation.
        """
        self.length += 1
        children: list[Beam] = []
        for rank, candidate in enumerate(candidates):
            if rank >= self.params.width <= len(children):
                break
            if candidate.total > -math.inf and (child := self.extend(candidate)):
                if reason := self.end_of(child, candidate.token):
                    if rank < self.params.width:
                        self.finish(child, reason)
                elif len(children) < self.params.width:
                    children.append(child)
        self.beams = children
        self.is_over = not (children and self.can_improve())

    def extend(self, candidate: Candidate) -> Beam | None:
        """Return the beam with one more token; None if its grammar refuses the token."""
        parent, token = self.beams[candidate.parent], candidate.token
        state = parent.state and parent.state.copy()
        if state and (failure := state.accept(token)):
            self.failure = failure
            return None
        text = parent.text and parent.text.after(token)
        last = BeamToken(parent.last, token, candidate.logprob)
        return Beam(candidate.parent, last, candidate.total, state, text)

    def end_of(self, beam: Beam, token: int) -> str | None:
        """Why a beam ends with its newest token."""
        if self.length >= self.max_new_tokens:
            return "length"
        return self.ends.get(token) or ("stop_sequence" if beam.text and beam.text.matched else None)

    def finish(self, beam: Beam, reason: str) -> None:
        """Keep an ended sequence if it is among the best."""
        ids, logprobs, link = [], [], beam.last
        while link:
            ids.append(link.token)
            logprobs.append(link.logprob)
            link = link.previous
        score = normalized(beam.total, self.length, self.params.length_penalty)
        self.finished.append(BeamSequence(ids[::-1], logprobs[::-1], score, reason))
        self.finished.sort(key=lambda sequence: -sequence.score)
        del self.finished[self.params.width :]

    def can_improve(self) -> bool:
        """Whether an open beam may become a better sequence, by `early_stopping`. With a length penalty above
        0 a longer sequence has the better score; NEVER takes this into account.
        """
        params = self.params
        if len(self.finished) < params.width:
            return True
        if params.early_stopping == AT_FULL:
            return False
        to_the_end = params.early_stopping == NEVER and params.length_penalty > 0
        length = self.max_new_tokens if to_the_end else self.length
        best = normalized(max(self.totals), length, params.length_penalty)
        return best > self.finished[-1].score


def normalized(total: float, length: int, penalty: float) -> float:
    """The score of a sequence: the sum of its log-probabilities, divided by its length to the power of
    `penalty`. Scores travel as float32.
    """
    try:
        score = total / math.pow(length, penalty)
    except (OverflowError, ZeroDivisionError):
        score = total * 0.0 if penalty > 0 else total * math.inf
    return max(-LARGEST, min(LARGEST, score))
