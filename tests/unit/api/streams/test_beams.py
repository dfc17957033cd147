"""Streams of a beam search get their records in any slices."""

import pytest

from api.streams.beams import BeamSearchStream, all_outputs, is_absent, new_stream
from api.streams.stream import Stream
from common.messages.events import Terminal
from common.messages.records import RECORD, pack_ids, pack_sequences, unpack_records
from common.messages.request import BeamParams, Generate, StoppingParams
from tests.support.answers.beams import SEQUENCES, TEXTS
from tests.support.tokenizer import model_tokenizer

RECORDS = pack_sequences(SEQUENCES)
NUM_RECORDS = len(RECORDS) // RECORD.size


def new_search(num_returned: int = 4) -> Stream:
    beams = BeamParams(4, num_returned=num_returned)
    return new_stream(
        Generate("r", "d", pack_ids([28]), StoppingParams(99, stop=["zzz"]), beams=beams), model_tokenizer()
    )


def feed(search: Stream, num_records: int, slice_size: int) -> None:
    ids, logprobs, _ = unpack_records(RECORDS)
    for begin in range(0, num_records, slice_size):
        end = min(begin + slice_size, num_records)
        search.add_committed(begin, ids[begin:end], logprobs[begin:end], [])


@pytest.mark.parametrize("slice_size", [1, 2, 5, NUM_RECORDS])
@pytest.mark.parametrize("num_returned", [1, 3, 4])
def test_each_sequence_is_an_answer_of_its_own(slice_size: int, num_returned: int) -> None:
    search = new_search(num_returned)
    assert not search.end(Terminal("r", "eos_token", NUM_RECORDS)), "its records are read first"
    feed(search, NUM_RECORDS, slice_size)
    assert search.finished and search.ended.is_set()
    outputs = all_outputs([search])
    assert len(outputs) == num_returned
    for output, expected, text in zip(outputs, SEQUENCES, TEXTS, strict=False):
        assert (output.ids, output.logprobs) == (expected.ids, expected.logprobs)
        assert output.terminal and output.terminal.reason == expected.reason
        assert output.text == text and "".join(output.texts).startswith(text)
        assert not is_absent(output)


def test_sequences_fail_with_their_search() -> None:
    search = new_search()
    search.fail("a cause")
    assert {output.terminal and output.terminal.error for output in all_outputs([search])} == {"a cause"}


@pytest.mark.parametrize("num_records", [0, 3, NUM_RECORDS - 1])
def test_a_sequence_that_is_cut_fails_the_search(num_records: int) -> None:
    search = new_search()
    feed(search, num_records, 2)
    assert search.end(Terminal("r", "length", num_records))
    assert search.terminal and not search.finished and "cannot be read" in search.terminal.error
    assert all(output.terminal for output in all_outputs([search]))


def test_sequences_that_were_not_found_are_absent() -> None:
    search = new_search()
    num_records = len(SEQUENCES[0].ids) + 1
    feed(search, num_records, 2)
    assert search.end(Terminal("r", "eos_token", num_records)) and search.finished
    assert [is_absent(output) for output in all_outputs([search])] == [False, True, True, True]


def test_other_requests_have_plain_streams() -> None:
    plain = new_stream(Generate("r", "d", pack_ids([28]), StoppingParams(9)), model_tokenizer())
    assert not isinstance(plain, BeamSearchStream) and [*plain.outputs] == [plain]
