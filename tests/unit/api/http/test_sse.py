"""Feeds give what is ready, in order; each frame is written once, as one chunk, however its client reads;
clients skip the comments between frames.
"""

import asyncio
import logging
from typing import Any

import h11
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import RequestResponseCycle

from api.http.sse import (
    CYCLE,
    MAX_ITEMS,
    RAW_SEND,
    Change,
    Feed,
    FeedResponse,
    RestOfFeed,
)
from tests.unit.api.http.test_protocol import turns

# --- feeds --------------------------------------------------------------------------------------------------


class Letters(Feed[str]):
    """The letters that have come, two at a time; `.` is the last."""

    def __init__(self, come: str = "") -> None:
        super().__init__(Change())
        self.come = come

    def take(self) -> list[str]:
        new, self.come = [*self.come[:2]], self.come[2:]
        self.ended = "." in new
        return new

    def put(self, come: str) -> None:
        self.come += come
        self.changed.set()


async def test_items_that_were_seen_are_skipped_however_they_are_grouped() -> None:
    for num_seen in range(6):
        letters = RestOfFeed(Letters("abcd."), num_seen)
        assert not letters.is_prepared or not num_seen
        assert "".join([letter async for new in letters for letter in new]) == "abcd."[num_seen:]


# --- writing ------------------------------------------------------------------------------------------------

HIGH = 400
"""Bytes that a client may leave unread before its gateway pauses."""
LAST = 10**6


class Numbers(Feed[bytes]):
    """A frame for each number that has come; LAST is the last."""

    def __init__(self) -> None:
        super().__init__(Change())
        self.come: list[int] = []

    def take(self) -> list[bytes]:
        new, self.come = self.come[:MAX_ITEMS], self.come[MAX_ITEMS:]
        self.ended = LAST in new
        return [b"data: %d\n\n" % number for number in new]

    def put(self, *numbers: int) -> None:
        self.come += numbers
        self.changed.set()


class SlowClient(asyncio.Transport):
    """A transport whose client reads when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.flow = FlowControl(self)
        self.written: list[bytes] = []
        self.unread = 0

    def write(self, data: Any) -> None:
        self.written.append(data)
        self.unread += len(data)
        if self.unread > HIGH:
            self.flow.pause_writing()

    def read(self) -> None:
        self.unread = 0
        self.flow.resume_writing()

    @property
    def chunks(self) -> list[bytes]:
        return [data for data in self.written[1:] if data]


def chunk(number: int) -> bytes:
    frame = b"data: %d\n\n" % number
    return b"%x\r\n%b\r\n" % (len(frame), frame)


def respond(frames: Feed[bytes], client: SlowClient) -> asyncio.Task[None]:
    """Write an answer as the server does."""
    scope: Any = {"type": "http", "http_version": "1.1", "method": "POST", "state": {}, "headers": []}
    connection = h11.Connection(h11.SERVER)
    connection.receive_data(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
    while not isinstance(connection.next_event(), h11.EndOfMessage):
        pass
    cycle = RequestResponseCycle(
        scope=scope,
        conn=connection,
        transport=client,
        flow=client.flow,
        logger=logging.getLogger(),
        access_logger=logging.getLogger(),
        access_log=False,
        default_headers=[],
        message_event=asyncio.Event(),
        on_response=lambda: None,
    )
    scope |= {"state": {RAW_SEND: cycle.send}, "extensions": {CYCLE: cycle}}
    return asyncio.create_task(FeedResponse(frames, b": \n\n", {})(scope, cycle.receive, cycle.send))  # type: ignore[arg-type]


STEPS = st.lists(st.tuples(st.sampled_from(["put", "read", "turn"]), st.integers(1, 2 * MAX_ITEMS)))


@settings(max_examples=300)
@given(steps=STEPS)
def test_frames_are_written_once_and_in_order_however_the_client_reads(steps: list[tuple[str, int]]) -> None:
    async def run() -> None:
        numbers, client, put = Numbers(), SlowClient(), 0
        running = respond(numbers, client)
        for step, size in steps:
            if step == "put":
                numbers.put(*range(put, put + size))
                put += size
            elif step == "read":
                client.read()
            else:
                await turns(size % 8)
        numbers.put(LAST)
        async with asyncio.timeout(30):
            while not running.done():
                client.read()
                await turns(1)
        assert client.chunks == [*map(chunk, range(put)), chunk(LAST), b"0\r\n\r\n"]

    asyncio.run(run())


async def test_a_frame_is_written_in_the_call_that_brings_it_as_long_as_its_client_reads() -> None:
    numbers, client = Numbers(), SlowClient()
    running = respond(numbers, client)
    numbers.put(0)
    await turns(8)
    numbers.put(1)
    assert client.chunks == [chunk(0), chunk(1)]
    client.flow.pause_writing()
    for number in range(2, 3 * MAX_ITEMS):
        numbers.put(number)
        await turns(4)
    assert client.chunks == [chunk(0), chunk(1)], "what its client does not read stays with the tokens"
    async with asyncio.timeout(30):
        while len(client.chunks) < 3 * MAX_ITEMS:
            client.read()
            await turns(1)
    await turns(8)
    client.read()
    numbers.put(LAST)
    assert client.chunks == [*map(chunk, range(3 * MAX_ITEMS)), chunk(LAST)]
    await running
    assert client.chunks[-1] == b"0\r\n\r\n" and numbers.changed.listener is None


async def test_a_frame_that_cannot_be_rendered_ends_its_answer_and_harms_no_caller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    numbers, client = Numbers(), SlowClient()
    running = respond(numbers, client)
    numbers.put(0)
    await turns(8)

    def fail() -> list[bytes]:
        raise LookupError("no such token")

    monkeypatch.setattr(numbers, "take", fail)
    numbers.put(1)
    numbers.put(2)
    with pytest.raises(LookupError):
        await running
    assert client.chunks == [chunk(0)]
