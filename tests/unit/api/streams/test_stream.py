"""A stream takes events in order, twice, late, or with gaps; that of a beam search in any slices."""

from typing import Any

import pytest

from api.streams.stream import Stream, all_outputs, is_absent
from api.streams.stream import new_stream as new_stream_of
from common.messages.events import Terminal, Tokens
from common.messages.records import RECORD, pack_floats, pack_ids, pack_sequences, unpack_records
from common.messages.request import BeamParams, Generate, StoppingParams
from tests.support.answers.beams import SEQUENCES, TEXTS
from tests.support.events import IDS, end, new_stream, tokens
from tests.support.tokenizer import TOKENIZER, model_tokenizer

# --- stream -------------------------------------------------------------------------------------------------

START: int = TOKENIZER.token_to_id("<|im_start|>")  # type: ignore[assignment]


STREAMS: list[
    tuple[str, list[Tokens | Terminal], list[bool], list[int], bool]
] = [  # events; whether each fits; ids afterwards; whether the stream has ended
    ("in order", [tokens(0, 2), tokens(2, 3), end(3)], [True, True, True], IDS[:3], True),
    ("a repeat", [tokens(0, 2), tokens(0, 2), tokens(2, 3)], [True, True, True], IDS[:3], False),
    ("an old part again", [tokens(0, 3), tokens(1, 2)], [True, True], IDS[:3], False),
    ("an overlap", [tokens(0, 2), tokens(1, 4)], [True, True], IDS[:4], False),
    ("a gap", [tokens(0, 2), tokens(3, 4)], [True, False], IDS[:2], False),
    ("a gap at the start", [tokens(1, 2)], [False], [], False),
    ("an end too early", [tokens(0, 2), end(3)], [True, False], IDS[:2], False),
    ("nothing after the end", [tokens(0, 2), end(2), tokens(2, 3), end(3)], [True] * 4, IDS[:2], True),
    ("a lower attempt", [tokens(0, 2, 2), tokens(2, 3, 1)], [True, True], [i + 1 for i in IDS[:2]], False),
    ("a higher attempt", [tokens(0, 2), tokens(2, 3, 2)], [True, True], [*IDS[:2], IDS[2] + 1], False),
    ("shown ids are facts", [tokens(0, 2), tokens(0, 3, 2)], [True, False], IDS[:2], False),
    ("an answer of fewer tokens", [tokens(0, 2), end(1)], [True, False], IDS[:2], False),
    (
        "a lower attempt after a gap",
        [tokens(0, 1), tokens(2, 3, 2), tokens(1, 2, 1)],
        [True, False, True],
        IDS[:1],
        False,
    ),
]


@pytest.mark.parametrize(
    ("events", "fits", "ids", "ended"), [case[1:] for case in STREAMS], ids=[case[0] for case in STREAMS]
)
async def test_a_stream_takes_each_token_once(
    events: list[Tokens | Terminal], fits: list[bool], ids: list[int], ended: bool
) -> None:
    stream = new_stream()
    assert [
        stream.add_event(event) if isinstance(event, Tokens) else stream.end(event) for event in events
    ] == fits
    assert (stream.ids, stream.terminal is not None, stream.ended.is_set()) == (ids, ended, ended)


@pytest.mark.parametrize(
    ("stopping", "ids", "ready"),
    [
        ({}, IDS[:3], 3),
        ({}, [*IDS[:2], 2], 2),
        ({}, [*IDS[:2], START], 3),  # another special token, as [TOOL_CALLS] and <|channel|> are
        ({"stop_ids": [START]}, [*IDS[:2], START], 2),
        ({"ignore_eos": True}, [*IDS[:2], 2], 3),
        ({"stop": [" one"]}, IDS[:2], 1),
        ({"stop": ["ne tw"]}, IDS[:3], 2),
        ({"stop": ["none"]}, IDS[:3], 3),
        ({}, [IDS[0]] * 100, 99),
    ],
)
async def test_only_a_token_that_may_be_the_last_one_is_held_back(
    stopping: dict[str, Any], ids: list[int], ready: int
) -> None:
    stream = new_stream(stopping=stopping)
    stream.add_event(
        Tokens(
            "r",
            1,
            0,
            pack_ids(ids),
            pack_floats([0.0] * len(ids)),
            [TOKENIZER.decode([i], skip_special_tokens=False) for i in ids],
        )
    )
    assert stream.num_ready == ready
    stream.end(Terminal("r", "error", 0, "gone"))
    assert stream.num_ready == len(ids)


# --- beams --------------------------------------------------------------------------------------------------

RECORDS = pack_sequences(SEQUENCES)
NUM_RECORDS = len(RECORDS) // RECORD.size


def new_search(num_returned: int = 4) -> Stream:
    beams = BeamParams(4, num_returned=num_returned)
    return new_stream_of(
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


@pytest.mark.parametrize("num_records", [0, 3, NUM_RECORDS - 1])
def test_a_sequence_that_is_cut_fails_the_search(num_records: int) -> None:
    search = new_search()
    feed(search, num_records, 2)
    assert search.end(Terminal("r", "length", num_records))
    assert search.terminal and not search.finished and "cannot be read" in search.terminal.error
    assert all(output.terminal for output in all_outputs([search]))
