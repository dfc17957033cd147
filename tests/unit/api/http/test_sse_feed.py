"""Feeds: what is ready is taken without waiting, an iteration waits for more."""

import asyncio

from api.http.sse import Change, Feed, FeedBehind, MappedFeed


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


async def test_an_iteration_waits_for_items_up_to_the_last() -> None:
    letters = Letters("abc")
    found = MappedFeed(letters, str.upper, ["end"])
    assert [await anext(found), await anext(found)] == [["A", "B"], ["C"]]
    waiting = asyncio.ensure_future(anext(found))
    await asyncio.sleep(0)
    letters.put("d.")
    assert await waiting == ["D", ".", "end"]
    assert [new async for new in found] == []


async def test_items_that_were_seen_are_skipped_however_they_are_grouped() -> None:
    for num_seen in range(6):
        letters = FeedBehind(Letters("abcd."), num_seen)
        assert not letters.is_prepared or not num_seen
        assert "".join([letter async for new in letters for letter in new]) == "abcd."[num_seen:]


async def test_a_listener_is_called_at_once_in_place_of_a_waiting_task() -> None:
    letters, seen = Letters(), list[str]()
    letters.changed.listener = lambda: seen.extend(letters.take())
    letters.put("ab")
    assert seen == ["a", "b"] and not letters.changed.is_set()
