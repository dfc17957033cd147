"""What is kept of a request that has ended."""

from common.messages.codec import decode, encode
from common.messages.events import Result
from common.messages.finish_reasons import result_for, terminal_for
from common.messages.packing import pack_floats, pack_ids
from common.messages.records import pack_records

NUM_TOKENS = 512
RECORDS = pack_records(pack_ids([*range(NUM_TOKENS)]), pack_floats([-0.5] * NUM_TOKENS), b"", b"")


def test_a_result_is_the_tokens_as_they_are() -> None:
    """Eight bytes each; whoever reads it words the answer."""
    result = encode(result_for(terminal_for("r", "length", NUM_TOKENS), RECORDS))
    assert RECORDS in result and len(result) <= 8 * NUM_TOKENS + 16


def test_the_result_of_a_failure_is_its_words_alone() -> None:
    result = decode(Result, encode(result_for(terminal_for("r", "timeout", NUM_TOKENS), RECORDS)))
    assert (result.records, result.error_type) == (b"", "timeout") and result.error
