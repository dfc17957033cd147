"""What proposes the next tokens of rows: their grammars (jump-forward), n-grams, suffixes, or a drafter; and
how many at a time pay, by how many were right so far, by what a proposal costs (times that are measured at
the start), and by what trials may lose. No tensors.

N-grams: the last ids of a row are looked up in its own ids (prompt look-up).

Suffix decoding (arXiv:2411.04975): what a row writes next is found in its own ids and in the worker's recent
answers, by the longest suffix that occurs there. How often a token followed says how far a guess goes. An
index of pairs of ids finds the same places as a suffix tree, with less memory and constant work a token.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import InitVar, dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from common.settings.speculation import GRAMMAR, NGRAM, SUFFIX, Speculation
from gpu_worker.engine.batch.sampling_state import GrammarMask
from gpu_worker.engine.batch.step_result import Int32

PROPOSAL_COST = 0.35
"""What it costs to check a proposal, as a share of a token's time: proposals pay if more are right."""
TRIAL_PROPOSALS = 12
"""Proposals before a row is judged."""
COUNT_DECAY = 0.9
"""Earlier counts are multiplied by it at each check."""
FIRST_PAUSE, LONGEST_PAUSE = 16, 512
"""Tokens without proposals once they do not pay. Each pause is twice as long as the one before."""
LOSS_SHARE = 0.015
"""What trials may lose, as a share of the time of all tokens."""
FIRST_LOSS, MOST_LOSS = 2.0, 4.0
"""What trials may lose at first, and at once: times of a token."""
HOPED = 0.3
"""Checks that are added to each place, right as often as at the place before: what was not tried for long is
tried again.
"""


@dataclass(slots=True)
class ProposalCosts:
    """What proposals cost, and what trials of all rows may lose.

    A step of n tokens takes step_ms + (n - 1) * token_ms. So a proposal costs little where one row decodes,
    since weights are read once a step, and much where a step is bound by arithmetic. Each token adds a small
    share of its time to what may be lost, and proposals that are right add what they save.

    Attributes:
        step_ms: a step of one token.
        token_ms: each token more.
        draft_ms, draft_token_ms: the same of the model that proposes, for one proposal of each row.
        num_rows: rows in the next step.
        left: what may be lost, in times of a token; negative where more was lost.
        is_open: whether proposals may be tried. Once all is lost they wait until a trial is worth while.
    """

    step_ms: float = 1.0
    token_ms: float = PROPOSAL_COST
    draft_ms: float = 0.0
    draft_token_ms: float = 0.0
    num_rows: int = 1
    left: float = FIRST_LOSS
    is_open: bool = True

    def of_one(self, num_drafting: int = 0) -> float:
        """What one proposal costs, as a share of the time that its row's own token takes. If only so many
        rows were drafted for, they alone bear the draft's time.
        """
        others, num_drafting = self.num_rows - 1, num_drafting or self.num_rows
        drafting_ms = self.draft_ms + (num_drafting - 1) * self.draft_token_ms
        per_proposal_ms = drafting_ms / num_drafting + self.token_ms
        return self.num_rows * per_proposal_ms / (self.step_ms + others * self.token_ms)

    def set(self, step_ms: float, token_ms: float, draft_ms: float, draft_token_ms: float) -> None:
        """Take times that were measured."""
        self.step_ms, self.token_ms = step_ms, token_ms
        self.draft_ms, self.draft_token_ms = draft_ms, draft_token_ms

    def count(self, num_tokens: int, num_proposed: int, num_drafting: int) -> None:
        """Count the tokens of a row's step, and what its proposals won or lost."""
        won = num_tokens - 1 - self.of_one(num_drafting) * num_proposed if num_proposed else 0.0
        self.left = min(MOST_LOSS, self.left + LOSS_SHARE * num_tokens + won)
        self.is_open = self.left > 0 if self.is_open else self.left >= FIRST_LOSS


@dataclass(slots=True)
class Acceptance:
    """What became of a row's proposals, by their place after the row's own token.

    Attributes:
        checked: by place, how often all proposals before were right; earlier checks count less and less.
        right: by place, how often this one was right, too.
        proposed: proposals that were checked, as `checked`.
        pause: tokens until the next proposal.
        next_pause: the length of the next pause.
        costs: those of all rows together.
    """

    checked: list[float] = field(default_factory=list)
    right: list[float] = field(default_factory=list)
    proposed: float = 0.0
    pause: int = 0
    next_pause: int = FIRST_PAUSE
    costs: ProposalCosts = field(default_factory=ProposalCosts)

    @property
    def is_paused(self) -> bool:
        return self.pause > 0 or (self.is_on_trial and not self.costs.is_open)

    @property
    def is_on_trial(self) -> bool:
        """Whether too little was proposed to judge."""
        return self.proposed < TRIAL_PROPOSALS

    def num_worth(self, most: int) -> int:
        """How many proposals bring most tokens for their time, at most `most`; 0 during a pause, which begins
        where none do.
        """
        cost = self.costs.of_one()
        if not most or cost >= 1 or self.is_paused:  # at such a cost none pays, even if all are right
            return 0
        if self.is_on_trial:
            return most
        if count := self.best(most, cost):
            self.next_pause = FIRST_PAUSE
        else:
            self.give_up()
        return count

    def best(self, most: int, cost: float) -> int:
        """The number of proposals with the most tokens for their time, by the counts."""
        best, most_tokens, tokens, chance, share = 0, 1.0, 1.0, 1.0, 1.0
        for place in range(most):
            share = self.share_right(place, share)
            chance *= share
            tokens += chance
            if (value := tokens / (1 + cost * (place + 1))) > most_tokens:
                best, most_tokens = place + 1, value
        return best

    def share_right(self, place: int, share_before: float) -> float:
        """How often the proposal at a place is right if all before it are."""
        if place >= len(self.checked):
            return share_before
        return (self.right[place] + HOPED * share_before) / (self.checked[place] + HOPED)

    def learn(self, num_tokens: int, num_proposed: int, num_drafting: int = 0) -> None:
        """Take what a step brought: its own token and, of `num_proposed`, those that were right; so many rows
        were drafted for, 0 for all.
        """
        self.costs.count(num_tokens, num_proposed, num_drafting)
        self.pause = max(0, self.pause - num_tokens)
        if num_proposed:
            self.count(num_tokens - 1, num_proposed)

    def count(self, num_right: int, num_proposed: int) -> None:
        """Count the places of one check."""
        missing = num_proposed - len(self.checked)
        self.checked += [0.0] * missing
        self.right += [0.0] * missing
        self.proposed = COUNT_DECAY * self.proposed + num_proposed
        for place in range(len(self.checked)):
            self.checked[place] = COUNT_DECAY * self.checked[place] + (
                place <= num_right and place < num_proposed
            )
            self.right[place] = COUNT_DECAY * self.right[place] + (place < num_right)

    def give_up(self) -> None:
        """Propose nothing for a while, then try again."""
        self.checked, self.right, self.proposed = [], [], 0.0
        self.pause, self.next_pause = self.next_pause, min(2 * self.next_pause, LONGEST_PAUSE)


MAX_FORCED = 15
"""Proposals of a grammar at a time."""
MAX_UNREADY = 2
"""Drafts in vain: heads are ready at the second, and a model once it has computed the row so far."""


class RowIds:
    """The ids of a row, prompt and generation, as they grow.

    Attributes:
        known: array whose first `length` ids are those of prompt and generation.
    """

    def __init__(self, ids: Int32) -> None:
        self.known = np.array(ids, np.int32)
        self.length = len(ids)

    @property
    def last(self) -> int:
        return int(self.known[self.length - 1])

    def append(self, tokens: Sequence[int]) -> None:
        end = self.length + len(tokens)
        if end > len(self.known):
            self.known = np.concatenate((self.known[: self.length], np.empty(end, np.int32)))
        self.known[self.length : end] = tokens
        self.length = end

    def matches(self, min_match: int, max_match: int) -> tuple[list[int], int]:
        """The places after the longest earlier occurrences of the last ids, oldest first, and how many ids
        these are; none below `min_match`.
        """
        known = self.known[: self.length]
        ends = np.flatnonzero(known[:-1] == known[-1])
        num_matched = 1 if ends.size else 0
        while ends.size and num_matched < min(max_match, self.length - 1):
            longer = ends[ends >= num_matched]
            longer = longer[known[longer - num_matched] == known[-1 - num_matched]]
            if not longer.size:
                break
            ends, num_matched = longer, num_matched + 1
        return ((ends + 1).tolist(), num_matched) if num_matched >= min_match else ([], 0)


MAX_TOKENS = 2**17
"""Tokens of recent answers that are kept, at most; each takes about 150 bytes."""
MAX_PLACES = 64
"""Places of one pair of ids that are kept, and occurrences that are compared: the newest."""
MIN_SUFFIX = 2
"""How many of the last ids are looked up, at least: the index is of pairs."""

Place = tuple[Sequence[int] | Int32, int]
"""The ids of an answer, and the place of one that follows a match."""


@dataclass(slots=True)
class RecentAnswers:
    """Answers of the worker's rows, the newest: they grow while their rows run.

    Attributes:
        max_answers: how many are kept, at most; 0 keeps none.
        answers: by number, oldest first.
        places: (id, next id) → (answer, place after the pair), oldest first.
        num_tokens: of all answers.
        next_number: of the next answer.
    """

    max_answers: int
    max_tokens: int = MAX_TOKENS
    answers: dict[int, list[int]] = field(default_factory=dict)
    places: dict[tuple[int, int], list[tuple[int, int]]] = field(default_factory=dict)
    num_tokens: int = 0
    next_number: int = 0

    def begin(self) -> int:
        """The number of a new answer."""
        self.next_number += 1
        return self.next_number

    def append(self, number: int, tokens: Iterable[int]) -> None:
        """Append to an answer. One that was dropped begins anew."""
        if not self.max_answers:
            return
        answer = self.answers.setdefault(number, [])
        for token in tokens:
            answer.append(token)
            if len(answer) > 1:
                places = self.places.setdefault((answer[-2], token), [])
                places.append((number, len(answer)))
                if len(places) > MAX_PLACES:
                    del places[0]
            self.num_tokens += 1
        while len(self.answers) > self.max_answers or self.num_tokens > self.max_tokens:
            self.drop_oldest()

    def drop_oldest(self) -> None:
        number = next(iter(self.answers))
        answer = self.answers.pop(number)
        self.num_tokens -= len(answer)
        for pair in {*pairwise(answer)}:
            kept = [place for place in self.places.get(pair, ()) if place[0] != number]
            if kept:
                self.places[pair] = kept
            else:
                self.places.pop(pair, None)

    def matches(self, tail: Sequence[int], own: int) -> tuple[list[Place], int]:
        """The places after the longest occurrences of the end of `tail` in answers but `own`, newest first,
        and how many ids these are.
        """
        if len(tail) < MIN_SUFFIX:
            return [], 0
        found = reversed(self.places.get((tail[-2], tail[-1]), []))
        places = [(self.answers[number], place) for number, place in found if number != own]
        lengths = [match_length(tail, answer, place) for answer, place in places]
        longest = max(lengths, default=0)
        return [one for one, length in zip(places, lengths, strict=True) if length == longest], longest


def match_length(tail: Sequence[int], ids: Sequence[int], place: int) -> int:
    """How many ids before a place are those at the end of `tail`."""
    length = 0
    while length < min(len(tail), place) and tail[-1 - length] == ids[place - 1 - length]:
        length += 1
    return length


def most_frequent(
    places: Sequence[Place], count: int, min_prob: float, repeats: bool = False
) -> tuple[list[int], float]:
    """The ids that followed most often at the places, at most `count`, as long as their probability is
    `min_prob`; and the sum of these probabilities: how many are right, as expected. Past the end of the ids a
    guess that `repeats` goes on with itself.
    """
    tokens: list[int] = []
    expected, probability = 0.0, 1.0
    for step in range(count):
        followers = [follower(ids, place + step, tokens if repeats else ()) for ids, place in places]
        counts = Counter(token for token in followers if token is not None)
        if not counts:
            break
        token, number = counts.most_common(1)[0]
        probability *= number / len(places)
        if probability < min_prob:
            break
        expected += probability
        tokens.append(token)
        places = [one for one, own in zip(places, followers, strict=True) if own == token]
    return tokens, expected


def follower(ids: Sequence[int] | Int32, place: int, guessed: Sequence[int]) -> int | None:
    """The id at a place; past the end that of the guess; None past the end of both."""
    if place < len(ids):
        return int(ids[place])
    past = place - len(ids)
    return guessed[past] if past < len(guessed) else None


class Guesser:
    """Guesses what follows a row's last ids.

    By suffixes: what followed most often in the row's own text, or in recent `answers`, where more is
    expected to be right; a guess is as long as the match, times `suffix_decoding_max_spec_factor`. By n-grams
    (without `answers`): what followed the newest of the longest occurrences in the row's own text.
    """

    def __init__(self, ids: Int32, how: Speculation, answers: RecentAnswers | None = None) -> None:
        self.text = RowIds(ids)
        self.answers = answers
        self.method = SUFFIX if answers else NGRAM
        self.number = answers.begin() if answers else 0
        self.min_match = MIN_SUFFIX if answers else how.prompt_lookup_min
        self.max_match = how.suffix_decoding_max_tree_depth if answers else how.prompt_lookup_max
        self.factor = how.suffix_decoding_max_spec_factor
        self.min_prob = how.suffix_decoding_min_token_prob

    def guess(self, count: int) -> list[int]:
        """At most `count` ids."""
        known = self.text.known[: self.text.length]
        places, own_length = self.text.matches(self.min_match, self.max_match)
        own = [(known, place) for place in reversed(places[-MAX_PLACES:])]
        if not self.answers:
            return most_frequent(own[:1], count, min_prob=0, repeats=True)[0]
        others, length = self.answers.matches(known[-self.max_match :].tolist(), self.number)
        found = most_frequent(own, min(count, self.longest(own_length)), self.min_prob, repeats=True)
        other = most_frequent(others, min(count, self.longest(length)), self.min_prob)
        return found[0] if (found[1], own_length) >= (other[1], length) else other[0]

    def longest(self, match_length: int) -> int:
        """How long a guess may be after a match of so many ids."""
        return int(self.factor * match_length)

    def append(self, tokens: Sequence[int]) -> None:
        """Take the row's next ids."""
        self.text.append(tokens)
        if self.answers:
            self.answers.append(self.number, tokens)


@dataclass(eq=False)
class Proposer:
    """Proposes what a row samples next; the model checks all proposals in one step.

    They are what the row's grammar forces. Where it forces nothing, they are what the row's guesser finds, or
    what a drafter has left here, up to the first token that the grammar forbids, and as far as they pay.

    Attributes:
        most: ids that are guessed or drafted at a time, at most; 0 for none.
        guesser: None where a drafter drafts, or `most` is 0.
        text: the row's ids, those sampled included.
        is_sure: all proposals are sampled but for rare cases, so the next step may be launched before they
            are checked.
        kv_len: of the ids, whose K and V the draft's cache has; None while nobody has looked.
        drafted: the next proposals of the drafter.
        num_drafting: rows that the last draft was for; 0 for all.
        num_unready: drafts since the last one that brought proposals.
        states: hidden states [tokens, any] of the last step with samples, and the position of the first.
    """

    ids: InitVar[Int32]
    grammar: GrammarMask | None = None
    most: int = 0
    acceptance: Acceptance = field(default_factory=Acceptance)
    guesser: Guesser | None = None
    drafts_by: str = ""
    kv_len: int | None = None
    states: Any = None
    drafted: Sequence[int] = ()
    num_drafting: int = 0
    num_unready: int = 0

    def __post_init__(self, ids: Int32) -> None:
        self.text = self.guesser.text if self.guesser else RowIds(ids)
        self.is_sure = self.most == 0

    @property
    def waits(self) -> bool:
        """Whether the next proposals need the tokens of the step in flight: the next step is launched only
        once that one is read.
        """
        return bool(self.drafts_by) and self.acceptance.costs.of_one() < 1 and not self.acceptance.is_paused

    @property
    def method(self) -> str:
        """Where the newest proposals come from, for metrics."""
        return GRAMMAR if self.is_sure else self.guesser.method if self.guesser else self.drafts_by

    def num_worth(self, most: int) -> int:
        """How many guesses or drafts pay, at most `most`."""
        return self.acceptance.num_worth(min(most, self.most))

    def take(self, drafted: Sequence[int], num_drafting: int) -> None:
        """Take the next proposals, of a draft for so many rows; none if there is no draft yet. A row that has
        none for long does not wait for steps in vain.
        """
        self.drafted, self.num_drafting = drafted, num_drafting
        self.num_unready = 0 if drafted else self.num_unready + 1
        if self.num_unready > MAX_UNREADY and self.acceptance.is_on_trial:
            self.num_unready, self.acceptance.pause = 0, FIRST_PAUSE

    def propose(self, most: int, skipped: int = 0) -> Sequence[int]:
        """Return at most `most` ids that follow the next `skipped` ones, which the step in flight samples;
        none if proposals do not pay.
        """
        if self.grammar:
            forced = self.grammar.forced(skipped + min(most, MAX_FORCED))[skipped:]
            self.is_sure = bool(forced) or not self.most
            if self.is_sure:
                return forced
        if self.guesser:
            count = self.num_worth(most)
            found: Sequence[int] = self.guesser.guess(skipped + count) if count else ()
        else:
            found, self.drafted = () if skipped else self.drafted[:most], ()
        if self.grammar and found:
            found = found[: self.grammar.num_allowed(found)]
        return found[skipped:]

    def learn(self, tokens: Sequence[int], num_proposed: int) -> None:
        """Take the tokens that a step with `num_proposed` proposals sampled: all but the last were
        proposed.
        """
        if not self.most:  # the grammar has taken them
            return
        (self.guesser or self.text).append(tokens)
        if self.kv_len is not None:  # that of wrong drafts does not count, and the newest token has none
            self.kv_len = min(self.kv_len, self.text.length - 1)
        self.acceptance.learn(len(tokens), 0 if self.is_sure else num_proposed, self.num_drafting)


ProposerFactory = Callable[[Int32, GrammarMask | None], Proposer | None]
"""(ids of a row so far, its grammar) → its proposer."""


def proposer_factory(
    speculation: Speculation, costs: ProposalCosts | None = None, drafts_by: str = "", num_drafted: int = 0
) -> ProposerFactory:
    """What makes the proposers of rows. `drafts_by`, `num_drafted`: the method of a drafter, if there is one,
    and how many tokens it drafts at a time.
    """
    number = num_drafted or speculation.num_found
    costs = costs or ProposalCosts()
    is_suffix = speculation.method == SUFFIX
    answers = RecentAnswers(speculation.suffix_decoding_max_cached_requests) if is_suffix else None

    def make(ids: Int32, grammar: GrammarMask | None) -> Proposer | None:
        if not number:
            return Proposer(ids, grammar) if grammar else None
        guesser = None if drafts_by else Guesser(ids, speculation, answers)
        return Proposer(ids, grammar, number, Acceptance(costs=costs), guesser, drafts_by)

    return make
