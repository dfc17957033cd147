"""Comparing: which tokens of an answer are lost, repeated or changed, beside the undisturbed answer.

Texts are compared, because every server sends them. Words are aligned first; a difference is then narrowed to
the characters that differ, and counted in tokens of the undisturbed answer.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from itertools import accumulate

PIECES = re.compile(r"\s*\w+|\s*[^\w\s]|\s+")
"""Words and signs, each with the white space before it: together they are the whole text."""
MIN_ANCHOR = 4
"""Fewer words in a row are the same by chance: after a change, they do not count as the answer going on."""


@dataclass(frozen=True, slots=True)
class Truth:
    """The undisturbed answer to a prompt.

    Attributes:
        frames: the texts that came, in order.
        num_tokens: as the server counts them; without such a count each frame is a token.
    """

    frames: Sequence[str]
    num_tokens: int
    text: str = field(init=False)
    begins: Sequence[int] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", "".join(self.frames))
        object.__setattr__(self, "begins", list(accumulate(map(len, self.frames), initial=0))[:-1])

    def count_tokens(self, begin: int, end: int) -> int:
        """Return how many tokens have some of these characters."""
        if begin >= end:
            return 0
        frames = bisect_left(self.begins, end) - bisect_right(self.begins, begin) + 1
        return max(1, round(frames * self.num_tokens / len(self.frames)))


@dataclass(frozen=True, slots=True)
class TokenErrors:
    """What is wrong with an answer, in tokens of the undisturbed one.

    Attributes:
        lost: tokens that are missing although later ones came, or although the answer ended as if whole.
        repeated: tokens that came once more.
        changed: tokens in whose place, or between which, a different text came.
        undelivered: tokens that are missing because the answer broke off.
    """

    lost: int = 0
    repeated: int = 0
    changed: int = 0
    undelivered: int = 0

    def __add__(self, other: "TokenErrors") -> "TokenErrors":
        return TokenErrors(
            self.lost + other.lost,
            self.repeated + other.repeated,
            self.changed + other.changed,
            self.undelivered + other.undelivered,
        )


@dataclass(frozen=True, slots=True)
class TextDifference:
    """Characters of the truth in whose place other characters of the answer came."""

    begin: int
    end: int
    answer_begin: int
    answer_end: int


def compare(truth: Truth, text: str, is_whole: bool) -> TokenErrors:
    """Compare the text of an answer with the truth.

    Args:
        is_whole: the answer ended as if nothing was missing. Otherwise it broke off, and its end is missing.
    """
    if text == truth.text:
        return TokenErrors()
    found = TokenErrors()
    for span in spans(truth.text, text):
        is_end = span.begin < span.end == len(truth.text) and span.answer_end == len(text)
        found += judge_end(truth, span) if is_end and not is_whole else judge(truth, text, span)
    return found


def judge(truth: Truth, text: str, span: TextDifference) -> TokenErrors:
    """Return what one difference is."""
    num_tokens = truth.count_tokens(span.begin, span.end)
    if span.answer_begin == span.answer_end:
        return TokenErrors(lost=num_tokens)
    if num_tokens:
        return TokenErrors(changed=num_tokens)
    if repeated := count_repeated(truth, text, span):
        return TokenErrors(repeated=repeated)
    return TokenErrors(changed=count_by_length(truth, span))


def judge_end(truth: Truth, span: TextDifference) -> TokenErrors:
    """Return what the end of an answer that broke off is: what came in place of the truth is changed."""
    changed_end = min(span.end, span.begin + span.answer_end - span.answer_begin)
    return TokenErrors(
        changed=truth.count_tokens(span.begin, changed_end),
        undelivered=truth.count_tokens(changed_end, span.end),
    )


def count_repeated(truth: Truth, text: str, span: TextDifference) -> int:
    """Return how many tokens that came already the added characters are; 0 if they are none. In a text that
    comes twice, any part as long as it may be the one that an alignment takes for added.
    """
    begin, length = span.answer_begin, span.answer_end - span.answer_begin
    place = truth.text.find(text[begin : span.answer_end])
    if place >= 0:
        return truth.count_tokens(place, place + length)
    is_twice = any(
        text[i : i + length] == text[i + length : i + 2 * length]
        for i in range(max(0, begin - length), begin + 1)
    )
    return count_by_length(truth, span) if is_twice else 0


def count_by_length(truth: Truth, span: TextDifference) -> int:
    """Return how many tokens the added characters are, by the mean length of the truth's tokens."""
    per_character = truth.num_tokens / max(1, len(truth.text))
    return max(1, round((span.answer_end - span.answer_begin) * per_character))


def spans(truth: str, text: str) -> Iterator[TextDifference]:
    """Yield the differences of two texts, in order."""
    sides = PIECES.findall(truth), PIECES.findall(text)
    ends = [list(accumulate(map(len, pieces), initial=0)) for pieces in sides]
    at, at_answer = 0, 0
    for same in anchors(*sides):
        begin, answer_begin = ends[0][same[0]], ends[1][same[1]]
        if begin > at or answer_begin > at_answer:
            yield narrow(truth, text, TextDifference(at, begin, at_answer, answer_begin))
        at, at_answer = ends[0][same[0] + same[2]], ends[1][same[1] + same[2]]


def anchors(truth: Sequence[str], pieces: Sequence[str]) -> Iterator[tuple[int, int, int]]:
    """Yield (place in the truth, place in the answer, length) of what both have in common: long enough, or at
    the beginning or end of both. The last one is the end, which may be empty.
    """
    matcher = SequenceMatcher(None, truth, pieces, autojunk=False)
    for place, place_in_answer, length in matcher.get_matching_blocks():
        is_begin = not place and not place_in_answer
        is_end = place + length == len(truth) and place_in_answer + length == len(pieces)
        if length >= MIN_ANCHOR or (is_begin and length) or is_end:
            yield place, place_in_answer, length


def narrow(truth: str, text: str, span: TextDifference) -> TextDifference:
    """Leave out the characters at both ends of a difference that are the same in both texts."""
    begin, end, answer_begin, answer_end = span.begin, span.end, span.answer_begin, span.answer_end
    while begin < end and answer_begin < answer_end and truth[begin] == text[answer_begin]:
        begin, answer_begin = begin + 1, answer_begin + 1
    while begin < end and answer_begin < answer_end and truth[end - 1] == text[answer_end - 1]:
        end, answer_end = end - 1, answer_end - 1
    return TextDifference(begin, end, answer_begin, answer_end)
