"""Beams: what is packed of a beam search's sequences is what comes out."""

import pytest

from common.messages.codec import WireError
from common.messages.records import RECORD, BeamSequence, pack_sequences, unpack_sequences

SEQUENCES = [
    BeamSequence([5, 6, 7], [-0.5, -0.25, -1.0], -0.5, "eos_token"),
    BeamSequence([], [], 0.0, "stop_sequence"),
    BeamSequence([0], [-2.0], -2.0, "length"),
]


def test_sequences_come_out_as_they_were_packed() -> None:
    assert unpack_sequences(pack_sequences(SEQUENCES)) == SEQUENCES


def test_records_after_the_last_sequence_are_refused() -> None:
    with pytest.raises(WireError, match="last 1 records"):
        unpack_sequences(pack_sequences(SEQUENCES) + RECORD.pack(5, -1.0))
