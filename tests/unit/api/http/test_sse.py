"""Frames, and the comments between them, as clients read them."""

import pytest
from openai._streaming import SSEDecoder

from api.http.sse import COMMENT, COMMENT_AMONG_IDS
from tests.support.sse import frames_of

BODIES = ['{"a":1}', '{"a":2}']
PLAIN = [f"data: {body}\n\n".encode() for body in BODIES]
NUMBERED = [f"id: {i}\n".encode() + frame for i, frame in enumerate(PLAIN, 1)]


def content(frames: list[bytes], comment: bytes) -> bytes:
    return b"".join([comment, frames[0], comment, comment, frames[1], comment])


@pytest.mark.parametrize("stream", [content(PLAIN, COMMENT), content(NUMBERED, COMMENT_AMONG_IDS)])
def test_openai_reads_no_event_from_a_comment_between_frames(stream: bytes) -> None:
    """Its decoder dispatches an event without data at every empty line behind the first `id`."""
    assert [event.data for event in SSEDecoder().iter_bytes(iter([stream]))] == BODIES
    assert [data for _, data in frames_of(stream)] == BODIES


def test_clients_that_cut_streams_at_empty_lines_have_every_frame() -> None:
    """As `vllm bench serve` does: a piece that begins with a colon is left out, the others are `data:` and
    JSON.
    """
    pieces = content(PLAIN, COMMENT).decode().split("\n\n")
    texts = [piece.strip() for piece in pieces if piece.strip() and not piece.startswith(":")]
    assert [text.removeprefix("data: ") for text in texts] == BODIES
