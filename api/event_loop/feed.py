"""Feed: what is sent of an answer, in order, as far as its tokens have come."""

import asyncio
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")
S = TypeVar("S")

MAX_ITEMS = 128
"""Items that are rendered before other streams have their turn."""


class Change(asyncio.Event):
    """Set whenever an answer has something new.

    Attributes:
        listener: what is called at once in place of that, if anything.
    """

    listener: Callable[[], None] | None = None

    def set(self) -> None:
        if self.listener is None:
            super().set()
        else:
            self.listener()


class Feed(AsyncIterator[list[T]], Generic[T]):
    """The items of one answer: `take` returns those that are ready, an iteration waits for them.

    Attributes:
        changed: set when there may be more.
        ended: whether all were taken; then `take` is not called again.
    """

    def __init__(self, changed: Change) -> None:
        self.changed = changed
        self.ended = False

    @abstractmethod
    def take(self) -> list[T]:
        """The next items, MAX_ITEMS or a few more at most; none if no more are ready."""

    @property
    def is_prepared(self) -> bool:
        """Whether `take` may be called without `prepare`, from here on."""
        return True

    async def prepare(self) -> None:
        """Do what takes long before the next items can be taken."""

    async def __anext__(self) -> list[T]:
        """Items that are ready, at least one, after other tasks have had their turn."""
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
    """What a function makes of each item of another feed, and the `last` items behind them."""

    def __init__(self, source: Feed[S], function: Callable[[S], T], last: Sequence[T] = ()) -> None:
        super().__init__(source.changed)
        self.source = source
        self.function = function
        self.last = last

    def take(self) -> list[T]:
        new = [*map(self.function, self.source.take())]
        self.ended = self.source.ended
        return [*new, *self.last] if self.ended else new

    @property
    def is_prepared(self) -> bool:
        return self.source.is_prepared

    async def prepare(self) -> None:
        await self.source.prepare()


class FeedBehind(Feed[T]):
    """Another feed without its first items, which `prepare` skips as far as they are ready.

    Attributes:
        num_seen: how many are still to be skipped.
        first: items that came with the last of those.
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
