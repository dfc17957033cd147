"""Rest of an answer: whatever its predecessor wrote, the client has every byte once."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from api.handover.rest_of_answer import RestOfAnswer

COMMENT_CHUNK = b"4\r\n: \n\n\r\n"
CHUNKS = st.lists(st.binary(min_size=1, max_size=20), min_size=1, max_size=12)


class Transport:
    """Keeps what is written to it."""

    def __init__(self) -> None:
        self.data = b""
        self.is_aborted = self.is_closed = False

    def write(self, data: bytes) -> None:
        assert data
        self.data += data

    def is_closing(self) -> bool:
        return self.is_aborted

    def abort(self) -> None:
        self.is_aborted = True

    def close(self) -> None:
        self.is_closed = True


@given(CHUNKS, st.data())
def test_the_client_has_every_byte_once(chunks: list[bytes], data: Any) -> None:
    """Comments may be between any two chunks, several at one place; the last may not have been written."""
    sent, comments = b"", []
    for chunk in chunks:
        sent += chunk
        for _ in range(data.draw(st.integers(0, 2))):
            comments.append(len(sent))
            sent += COMMENT_CHUNK
    num_written = data.draw(st.integers(0, len(sent)))
    known = [offset for offset in comments if offset <= num_written]
    transport = Transport()
    rest = RestOfAnswer(transport, num_written, COMMENT_CHUNK, known)
    for chunk in chunks:
        rest.write(chunk)
    rest.insert_comments()
    rest.close()
    without_later = b"".join(whole(chunks, known))
    assert sent[:num_written] + transport.data == without_later
    assert transport.is_closed and not transport.is_aborted and not rest.is_behind


def whole(chunks: list[bytes], comments: list[int]) -> list[bytes]:
    pieces: list[bytes] = []
    left = [*comments]
    for chunk in chunks:
        pieces.append(chunk)
        while left and left[0] == sum(map(len, pieces)):
            left.pop(0)
            pieces.append(COMMENT_CHUNK)
    return pieces


def test_an_answer_that_is_rendered_otherwise_is_cut() -> None:
    """A comment within a chunk, or fewer bytes than were written: nothing may follow them."""
    for num_written, comments in ((0, [2]), (99, [])):
        transport = Transport()
        rest = RestOfAnswer(transport, num_written, COMMENT_CHUNK, comments)
        rest.write(b"head")
        rest.write(b"body")
        rest.close()
        assert transport.is_aborted
        assert transport.data in (b"", b"head")
