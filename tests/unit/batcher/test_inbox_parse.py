"""Parse: when a queued request's time to live began."""

import pytest

from batcher import inbox
from batcher.inbox import StreamEntry
from common.messages.codec import encode
from tests.support.broker_state import make_request

NOW_MS = 5000


@pytest.mark.parametrize(
    ("clock", "queued_ms"),
    [({b"clock": b"4000"}, 4000), ({}, NOW_MS), ({b"clock": b"9000"}, NOW_MS), ({b"clock": b"x"}, NOW_MS)],
)
def test_a_deadline_counts_from_what_the_pool_s_clock_showed(
    clock: dict[bytes, bytes], queued_ms: int
) -> None:
    """Not from the entry's id, which the broker's own clock makes; and never from the future."""
    request = make_request("r1")
    entry = StreamEntry("requests", "99999-0", {b"generate": encode(request), **clock})
    sequence = inbox.parse_sequence(entry, inbox.parse_queued_ms(entry, NOW_MS))
    assert sequence.deadline_ms == queued_ms + request.ttl_ms
