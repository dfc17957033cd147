"""What is kept of a request that has ended."""

from common.messages.events import ERRORS, kept_records, terminal_for

RECORDS = bytes(8 * 512)


def test_of_an_answer_the_tokens_are_kept_as_they_are() -> None:
    """Eight bytes each; whoever reads them words the answer."""
    assert kept_records(terminal_for("r", "length", 512), RECORDS) == RECORDS


def test_of_a_failure_its_words_alone_are_kept() -> None:
    error_type, error = ERRORS["timeout"]
    end = terminal_for("r", "timeout", 512)
    assert (end.reason, end.num_tokens, end.error, end.error_type) == ("error", 512, error, error_type)
    assert kept_records(end, RECORDS) == b""
