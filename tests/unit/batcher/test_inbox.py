"""Inbox: entries in order, handled in slices; how far a stream is done; when a time to live began."""

import asyncio
from functools import partial

import pytest
from redis.asyncio import Redis

from batcher import inbox
from batcher.inbox import Inbox, StreamEntry
from common.broker.keys import parse_stream_id
from common.messages.codec import encode
from tests.support.broker_state import make_request
from tests.support.waiting import wait_until

# --- inbox --------------------------------------------------------------------------------------------------


async def read(inbox: Inbox) -> None:
    inbox.read_ahead(50)
    await inbox.fill(waits=True)


async def test_entries_that_a_slice_leaves_come_with_the_next_and_are_not_done_before(redis: Redis) -> None:
    inbox = Inbox(redis)
    inbox.follow("s")
    ids = [(await redis.xadd("s", {"kind": str(number)})).decode() for number in range(3)]
    await read(inbox)
    await redis.xadd("s", {"kind": "later"})
    assert next(inbox.pop_entries(60.0)).data == b"0"
    assert list(inbox.pop_entries(0.0)) == [], "no time is left"
    assert inbox.done_id("s") == ids[1], "the next one"
    await read(inbox)
    assert [entry.data for entry in inbox.pop_entries(60.0)] == [b"1", b"2"], (
        "nothing is read before all is taken"
    )
    assert inbox.done_id("s") == ids[2]
    await read(inbox)
    assert [entry.data for entry in inbox.pop_entries(60.0)] == [b"later"]
    assert parse_stream_id(inbox.done_id("s")) > parse_stream_id(ids[2])


async def test_entries_of_a_watched_stream_come_once_though_no_read_waits(redis: Redis) -> None:
    inbox = Inbox(redis)
    inbox.follow("s")
    watching = asyncio.create_task(inbox.watch("s"))
    await wait_until(lambda: is_waiting(redis))
    for number in range(3):
        await redis.xadd("s", {"kind": str(number)})
        await wait_until(partial(has_entries, inbox, number + 1))
    watching.cancel()
    assert [entry.data for entry in inbox.pop_entries(60.0)] == [b"0", b"1", b"2"]
    await redis.xadd("s", {"kind": "later"})
    await read(inbox)
    assert [entry.data for entry in inbox.pop_entries(60.0)] == [b"later"]


async def test_an_entry_with_the_id_of_a_watched_one_is_not_missed(redis: Redis) -> None:
    """What is written into two streams in one millisecond has one id."""
    inbox = Inbox(redis)
    inbox.follow("s")
    inbox.follow("t")
    watching = asyncio.create_task(inbox.watch("s"))
    await wait_until(lambda: is_waiting(redis))
    await redis.xadd("s", {"kind": "watched"}, id="7-0")
    await redis.xadd("t", {"kind": "other"}, id="7-0")
    await wait_until(lambda: has_entries(inbox, 1))
    watching.cancel()
    assert [entry.data for entry in inbox.pop_entries(60.0)] == [b"watched"]
    await read(inbox)
    assert [entry.data for entry in inbox.pop_entries(60.0)] == [b"other"]


async def is_waiting(redis: Redis) -> bool:
    return bool((await redis.info("clients"))["blocked_clients"])


def has_entries(inbox: Inbox, count: int) -> bool:
    return len(inbox.unhandled) == count


async def test_what_is_due_long_since_is_no_time_to_read_in(redis: Redis) -> None:
    """A housekeeping that hangs is due all the time; its batcher reads on."""
    inbox = Inbox(redis)
    inbox.follow("due")
    await redis.xadd("due", {"kind": "1"})
    inbox.read_ahead(-60_000)
    await inbox.fill(waits=True)
    assert [entry.data for entry in inbox.pop_entries(60.0)] == [b"1"]


# --- inbox parse --------------------------------------------------------------------------------------------

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
