"""ChannelSequences: numbers rise by one on each channel, and the last one is repeated for a while."""

import pytest

from common.messages.codec import decode
from common.messages.events import REPEATED_FOR_S, ChannelSequences, Events


@pytest.fixture
def now_s(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that `sequences` sees, in its one element."""
    now = [1000.0]
    monkeypatch.setattr("common.messages.events.time.monotonic", lambda: now[0])
    return now


def repeated(channels: ChannelSequences) -> dict[str, Events]:
    return {channel: decode(Events, payload) for channel, payload in channels.repeated_messages()}


def test_each_channel_counts_from_one() -> None:
    channels = ChannelSequences("w0-1")
    assert [channels.next_number(name) for name in ("a", "a", "b", "a")] == [1, 2, 1, 3]


def test_the_last_number_is_repeated_without_tokens() -> None:
    channels = ChannelSequences("w0-1")
    for name in ("a", "a", "b"):
        channels.next_number(name)
    expected = {"a": Events("w0-1", 2), "b": Events("w0-1", 1)}
    assert repeated(channels) == expected
    assert repeated(channels) == expected, "a repetition is no new message"


def test_an_idle_channel_is_repeated_no_more(now_s: list[float]) -> None:
    channels = ChannelSequences("w0-1")
    channels.next_number("idle")
    now_s[0] += 1.0
    channels.next_number("used")
    now_s[0] += REPEATED_FOR_S - 0.5
    assert list(repeated(channels)) == ["used"]


def test_numbers_go_on_after_an_idle_time(now_s: list[float]) -> None:
    channels = ChannelSequences("w0-1")
    channels.next_number("a")
    now_s[0] += 2 * REPEATED_FOR_S
    assert repeated(channels) == {}
    assert channels.next_number("a") == 2
    assert repeated(channels) == {"a": Events("w0-1", 2)}


def test_a_channel_that_had_a_message_just_now_is_not_repeated(now_s: list[float]) -> None:
    channels = ChannelSequences("w0-1")
    channels.next_number("silent")
    now_s[0] += 0.25
    channels.next_number("busy")
    assert [channel for channel, _ in channels.repeated_messages(0.25)] == ["silent"]
