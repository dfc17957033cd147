"""Rest of an answer: a transport to which a gateway writes an answer from its first byte on, and which passes
on only the bytes that its predecessor has not written.
"""

import logging
from collections.abc import Sequence
from typing import Any

log = logging.getLogger(__name__)


class RestOfAnswer:
    """Skips the first `num_written` bytes, and inserts the comments that the predecessor has sent.

    Attributes:
        comment: a comment's bytes in the body.
        position: offset in the answer up to which it was rendered.
        comments: offsets of the comments that are not inserted yet.
    """

    def __init__(self, transport: Any, num_written: int, comment: bytes, comments: Sequence[int]) -> None:
        self.transport = transport
        self.num_written = num_written
        self.comment = comment
        self.comments = [*comments]
        self.position = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.transport, name)

    @property
    def is_behind(self) -> bool:
        """Whether the predecessor has written more than was rendered."""
        return self.position < self.num_written

    @property
    def untouched(self) -> Any:
        """The connection, while no byte of the answer is written on it; else None."""
        return None if max(self.position, self.num_written) > 0 else self.transport

    def write(self, data: bytes) -> None:
        """Write the new bytes of `data`: the head, a chunk, or a whole body."""
        self.insert_comments()
        self.put(data)

    def insert_comments(self) -> None:
        while self.comments and self.comments[0] <= self.position:
            if self.comments.pop(0) < self.position:
                self.cut("a comment is in the middle of a chunk")
            self.put(self.comment)

    def put(self, data: bytes) -> None:
        num_skipped = min(max(0, self.num_written - self.position), len(data))
        self.position += len(data)
        if num_skipped < len(data) and not self.transport.is_closing():
            self.transport.write(data[num_skipped:])

    def close(self) -> None:
        """Close the connection: the whole answer is rendered."""
        if self.is_behind:
            self.cut(f"{self.num_written} bytes were written, {self.position} are rendered")
        self.transport.close()

    def cut(self, why: str) -> None:
        """Cut the connection: the bytes rendered here differ from those that were written."""
        log.error("an inherited answer is cut: %s", why)
        self.transport.abort()


class WrittenHead:
    """A transport that keeps the head of one response."""

    def __init__(self) -> None:
        self.head = b""

    def write(self, data: bytes) -> None:
        self.head += data
