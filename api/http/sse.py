"""Server-sent events: the feed of an answer's frames, and the response that writes them.

Every gateway that renders an answer from its first token sends the same bytes, apart from keep-alive
comments. A frame depends only on the admitted request (`HttpAnswer`) and its tokens: on no clock, no
gateway's name, no grouping of tokens on their way. The frames of all choices have one order, and each is one
chunk of HTTP.
"""

import asyncio
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from itertools import count
from typing import Generic, TypeVar

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from api.answers.answer import HttpAnswer
from api.http.unread import wait_for_disconnect
from common.process.event_loop import run_until_one_ends

T = TypeVar("T")
S = TypeVar("S")

MAX_ITEMS = 128
"""Items that are rendered before other streams have their turn."""
CYCLE = "tokenfleet.cycle"
"""Extension of a scope: uvicorn's object for a request and its response."""
RAW_SEND = "raw_send"
"""Key of a request's state: the server's own `send`."""
SSE_HEADERS = {"content-type": "text/event-stream", "cache-control": "no-cache", "x-accel-buffering": "no"}
KEEP_ALIVE_S = 15.0
COMMENT = b": \n\n"
"""A keep-alive comment between two frames. It is an event of its own, for clients that split a stream at
empty lines.
"""
COMMENT_AMONG_IDS = b": \n"
"""A keep-alive comment if frames have ids: after the first id the `openai` package reads an event without
data at every empty line.
"""

# --- feeds --------------------------------------------------------------------------------------------------


class Change(asyncio.Event):
    """An event that is set when an answer has something new.

    Attributes:
        listener: if there is one, `set` calls it instead.
    """

    listener: Callable[[], None] | None = None

    def set(self) -> None:
        if self.listener is None:
            super().set()
        else:
            self.listener()


class Feed(AsyncIterator[list[T]], Generic[T]):
    """The items of one answer, in order: `take` returns those that are ready, an iteration waits for them.

    Attributes:
        changed: set when there may be more.
        ended: whether all have been taken; then `take` must not be called again.
    """

    def __init__(self, changed: Change) -> None:
        self.changed = changed
        self.ended = False

    @abstractmethod
    def take(self) -> list[T]:
        """The next items, about MAX_ITEMS at most; none if no more are ready."""

    @property
    def is_prepared(self) -> bool:
        """Whether `take` may be called without `prepare` from now on."""
        return True

    async def prepare(self) -> None:
        """Do long work that the next items need."""

    async def __anext__(self) -> list[T]:
        """Items that are ready, at least one; other tasks have their turn first."""
        await asyncio.sleep(0)
        while not self.ended:
            await self.prepare()
            self.changed.clear()
            if new := self.take():
                return new
            if not self.ended:
                await self.changed.wait()
        raise StopAsyncIteration


class MappedFeed(Feed[T], Generic[S, T]):
    """The results of a function for each item of another feed, and for the `last` items after them."""

    def __init__(self, source: Feed[S], function: Callable[[S], T], last: Sequence[S] = ()) -> None:
        super().__init__(source.changed)
        self.source = source
        self.function = function
        self.last = last

    def take(self) -> list[T]:
        items = self.source.take()
        self.ended = self.source.ended
        return [*map(self.function, [*items, *self.last] if self.ended else items)]

    @property
    def is_prepared(self) -> bool:
        return self.source.is_prepared

    async def prepare(self) -> None:
        await self.source.prepare()


class RestOfFeed(Feed[T]):
    """Another feed without its first `num_seen` items; `prepare` skips those that are ready.

    Attributes:
        num_seen: number of items that are still to be skipped.
        first: items that came together with the last one skipped.
    """

    def __init__(self, source: Feed[T], num_seen: int) -> None:
        super().__init__(source.changed)
        self.source = source
        self.num_seen = num_seen
        self.first: list[T] = []

    def take(self) -> list[T]:
        first, self.first = self.first, []
        new = first or ([] if self.source.ended else self.source.take())
        self.ended = self.source.ended
        return new

    @property
    def is_prepared(self) -> bool:
        return not self.num_seen and self.source.is_prepared

    async def prepare(self) -> None:
        await self.source.prepare()
        while self.num_seen and not self.source.ended and (new := self.source.take()):
            self.first = new[self.num_seen :]
            self.num_seen = max(0, self.num_seen - len(new))
            await asyncio.sleep(0)
            await self.source.prepare()


# --- writing ------------------------------------------------------------------------------------------------


Chunk = tuple[int, bytes]
"""The index of a choice, and the body of a frame."""


def sse_frames(answer: HttpAnswer, chunks: Feed[Chunk], last: Sequence[Chunk]) -> Feed[bytes]:
    """The frames of an answer's chunks, and of the last ones; a frame's id is its number, counted from 1."""
    if not answer.numbered:
        return MappedFeed(chunks, lambda chunk: b"data: %b\n\n" % chunk[1], last)
    ordinals = count(1)
    return MappedFeed(chunks, lambda chunk: b"id: %d\ndata: %b\n\n" % (next(ordinals), chunk[1]), last)


async def keep_raw_send(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """The outermost middleware: keeps the server's `send` in the request's state, for FeedResponse."""
    scope.setdefault("state", {})[RAW_SEND] = send
    await app(scope, receive, send)
    scope.clear()  # it refers to itself, and would stay until a full garbage collection


def as_chunk(part: bytes, http_version: str) -> bytes:
    """A part of a body of unknown length, as h11 writes it; HTTP/1.0 has no chunks."""
    return b"%x\r\n%b\r\n" % (len(part), part) if http_version >= "1.1" else part


class FeedResponse(Response):
    """Server-sent events of the hot path: a plain ASGI response, since sse-starlette would encode, log and
    time every frame.

    Only the head and the end of the response pass the middlewares. A frame that is ready while its client
    reads is written in the call that brings its token: to wake a task would take twice the time of all other
    work.

    Attributes:
        comment: keeps the connection alive, every `ping_interval` seconds.
        may_comment: whether a comment may be written now, without waiting.
        raw_send: the server's own `send`, for frames that cannot be written at once.
        cycle: uvicorn's object for the request: it has the transport and its flow control.
    """

    def __init__(self, frames: Feed[bytes], comment: bytes, headers: Mapping[str, str]) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers(headers)
        self.frames = frames
        self.comment = comment
        self.ping_interval = KEEP_ALIVE_S
        self.may_comment: Callable[[], bool] = lambda: True
        self.is_open = True
        self.send_lock = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response until the client has gone. A task group is not used: its cancelled tasks would
        keep the response in a reference cycle until a full garbage collection, which holds the event loop.
        """
        self.raw_send: Send = scope["state"][RAW_SEND]
        self.cycle = scope["extensions"][CYCLE]
        self.http_version = scope["http_version"]
        gone = wait_for_disconnect(scope, receive, self.send_comment)
        await run_until_one_ends(self.send_frames(send), gone, self.ping())

    async def send_frames(self, send: Send) -> None:
        async with self.send_lock:
            head = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            await send(head)
        async for frames in self.frames:
            for frame in frames:  # a chunk each: chunks do not depend on how frames were grouped
                await self.raw_send({"type": "http.response.body", "body": frame, "more_body": True})
            if len(frames) < MAX_ITEMS and self.frames.is_prepared:
                await self.write_as_they_come()
        async with self.send_lock:
            self.is_open = False
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def write_as_they_come(self) -> None:
        """Write frames when they come. Return after the last one, or when one cannot be written at once."""
        self.interrupted = asyncio.get_running_loop().create_future()
        self.frames.changed.listener = self.write_now
        try:
            self.write_now()  # frames that have come since the last `take`
            await self.interrupted
        finally:
            self.frames.changed.listener = None

    def write_now(self) -> None:
        """Write the frames that are ready, as long as the client reads."""
        if self.interrupted.done() or self.cycle.disconnected:
            return
        try:
            if self.frames.ended or self.cycle.flow.write_paused:
                self.interrupted.set_result(None)
                return
            new = self.frames.take()
            for frame in new:
                self.cycle.transport.write(as_chunk(frame, self.http_version))
            if self.frames.ended or len(new) >= MAX_ITEMS:
                self.interrupted.set_result(None)
        except Exception as error:
            self.interrupted.set_exception(error)

    async def ping(self) -> None:
        """Send comments until the last frame."""
        while self.is_open:
            await asyncio.sleep(self.ping_interval)
            await self.send_comment()

    async def send_comment(self) -> None:
        async with self.send_lock:
            if self.is_open and self.may_comment():
                await self.raw_send({"type": "http.response.body", "body": self.comment, "more_body": True})
