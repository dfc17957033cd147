"""What a lost, a repeated, a changed and an undelivered token is."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.chaos.compare import TokenErrors, Truth, compare, spans

WORDS = " one, two three four five six seven eight nine ten eleven twelve thir teen fourteen fifteen".split(
    " "
)
TOKENS = [f" {word}" if word != "teen" else word for word in WORDS[1:]]
"""One of them is the second half of a word."""
TRUTH = Truth(TOKENS, len(TOKENS))
ALL = range(len(TOKENS))
RIGHT = TokenErrors()


def text(*places: int) -> str:
    return "".join(TOKENS[i] for i in places)


def test_the_same_text_has_no_error() -> None:
    assert compare(TRUTH, TRUTH.text, is_whole=True) == RIGHT


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ([*ALL[:6], *ALL[8:]], TokenErrors(lost=2)),
        ([*ALL[1:]], TokenErrors(lost=1)),
        ([*ALL[:13], *ALL[14:]], TokenErrors(lost=1)),
        ([*ALL[:9]], TokenErrors(lost=len(TOKENS) - 9)),
        ([], TokenErrors(lost=len(TOKENS))),
        ([*ALL[:9], *ALL[6:]], TokenErrors(repeated=3)),
        ([*ALL[:5], *ALL], TokenErrors(repeated=5)),
        ([*ALL[:14], *ALL[13:]], TokenErrors(repeated=1)),
        ([*ALL, 3, 4], TokenErrors(repeated=2)),
        ([*ALL[:5], *ALL[:7], *ALL[8:]], TokenErrors(lost=1, repeated=5)),
    ],
)
def test_tokens_that_do_not_come_are_lost_and_those_that_come_again_are_repeated(
    places: Sequence[int], expected: TokenErrors
) -> None:
    assert compare(TRUTH, text(*places), is_whole=True) == expected


def test_another_text_in_the_place_of_tokens_is_changed() -> None:
    assert compare(TRUTH, text(*ALL[:5]) + " foo" + text(*ALL[6:]), True) == TokenErrors(changed=1)


def test_a_text_between_tokens_that_is_no_part_of_the_answer_is_changed() -> None:
    found = compare(TRUTH, text(*ALL[:8]) + " strange" + text(*ALL[8:]), True)
    assert found.changed >= 1
    assert found == TokenErrors(changed=found.changed)


def test_an_answer_that_goes_another_way_is_changed_to_its_end() -> None:
    """Words that stand in both ends by chance are no part of it."""
    other = text(*ALL[:9]) + " the fox eleven and fifteen hounds and"
    assert compare(TRUTH, other, is_whole=True) == TokenErrors(changed=len(TOKENS) - 9)


def test_the_end_of_an_answer_that_broke_off_is_undelivered() -> None:
    assert compare(TRUTH, text(*ALL[:9]), False) == TokenErrors(undelivered=len(TOKENS) - 9)
    assert compare(TRUTH, "", False) == TokenErrors(undelivered=len(TOKENS))


def test_tokens_lost_before_an_answer_broke_off_are_lost() -> None:
    found = compare(TRUTH, text(*ALL[:3], *ALL[4:9]), is_whole=False)
    assert found == TokenErrors(lost=1, undelivered=len(TOKENS) - 9)


def test_frames_of_several_tokens_are_counted_as_the_server_counts() -> None:
    truth = Truth([text(*ALL[i : i + 2]) for i in ALL[::2]], len(TOKENS))
    assert compare(truth, text(*ALL[:4], *ALL[8:]), is_whole=True) == TokenErrors(lost=4)


SIGNS = st.text(alphabet="ab ,\n", max_size=60)


@given(SIGNS, SIGNS, st.booleans())
def test_texts_are_equal_exactly_if_nothing_is_wrong(truth: str, answer: str, is_whole: bool) -> None:
    found = compare(Truth(list(truth) or [""], max(1, len(truth))), answer, is_whole)
    assert (found == RIGHT) == (truth == answer)


@given(SIGNS, SIGNS)
def test_what_lies_between_the_differences_is_the_same(truth: str, answer: str) -> None:
    rest, rest_of_answer = truth, answer
    for span in reversed(list(spans(truth, answer))):
        assert rest[span.end :] == rest_of_answer[span.answer_end :]
        rest, rest_of_answer = rest[: span.begin], rest_of_answer[: span.answer_begin]
    assert rest == rest_of_answer
