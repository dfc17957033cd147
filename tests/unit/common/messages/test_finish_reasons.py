"""What is kept of a request that has ended."""

from common.messages.finish_reasons import ERRORS, kept_of, terminal_for

NUM_TOKENS = 512
RECORDS = bytes(8 * NUM_TOKENS)


def test_of_an_answer_the_tokens_are_kept_as_they_are() -> None:
    """Eight bytes each; whoever reads them words the answer."""
    kept = kept_of(terminal_for("r", "length", NUM_TOKENS), RECORDS)
    assert kept == ["length", NUM_TOKENS, "", "", RECORDS]


def test_of_a_failure_its_words_alone_are_kept() -> None:
    error_type, error = ERRORS["timeout"]
    kept = kept_of(terminal_for("r", "timeout", NUM_TOKENS), RECORDS)
    assert kept == ["error", NUM_TOKENS, error, error_type, b""]
