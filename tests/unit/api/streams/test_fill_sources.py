"""Sources: what was lost between two messages of one source."""

from api.streams import fill
from api.streams.fill import Sources
from common.messages.events import Events, Terminal


def message(number: int, flush: int, source: str = "w0") -> Events:
    return Events(source, number, terminals=[Terminal("r", "length", 0)], flush=flush)


def test_what_was_lost_lies_behind_the_last_flush_that_was_heard() -> None:
    heard = Sources()
    assert heard.note(message(1, 7), "c") is None
    assert heard.note(message(2, 9), "c") is None
    assert heard.note(message(4, 12), "c") == 9
    assert heard.note(Events("w0", 4, flush=12), "c") is None, "the last number, repeated"
    assert heard.note(Events("w0", 5, flush=13), "c") == 12
    assert heard.last_flush("w0", "c") == 13 and heard.last_flush("w0", "other") == 0


def test_a_source_is_remembered_however_long_it_is_silent() -> None:
    """Only of so many other sources, each heard after it, is one too much."""
    heard = Sources()
    heard.note(message(1, 1), "c")
    for i in range(fill.MAX_SOURCES - 1):
        heard.note(message(1, 1, f"w{i + 1}"), "c")
    assert heard.note(message(2, 2), "c") is None
    heard.note(message(1, 1, "one more"), "c")
    assert len(heard.last) == fill.MAX_SOURCES and heard.last_flush("w0", "c") == 2
