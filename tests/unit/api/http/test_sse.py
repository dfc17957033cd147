"""Frames, and the comments between them, as clients read them."""

from collections.abc import Iterator

from openai._streaming import SSEDecoder

from api.heir.rest_of_answer import COMMENT
from api.http.sse import frame
from tests.support.sse import numbered


def content() -> Iterator[bytes]:
    yield from (COMMENT, frame(1, b'{"a":1}'), COMMENT, COMMENT, frame(2, b'{"a":2}'), COMMENT)


def test_openai_reads_no_event_from_a_comment_between_frames() -> None:
    """Its decoder dispatches an event without data at every empty line behind the first `id`."""
    assert [event.data for event in SSEDecoder().iter_bytes(content())] == ['{"a":1}', '{"a":2}']


def test_a_comment_hides_no_frame_from_the_clients_of_tests() -> None:
    assert numbered(b"".join(content())) == [(1, '{"a":1}'), (2, '{"a":2}')]
