"""Rest of an answer: a transport through which a gateway renders an answer from its first byte, and which
writes only what its predecessor has not.
"""

import logging
from collections.abc import Sequence
from typing import Any

log = logging.getLogger(__name__)


class RestOfAnswer:
    """Leaves out the first `num_written` bytes, and puts back the comments that the predecessor sent.

    Attributes:
        comment: as it stands in the body.
        position: offset in the answer up to which it was rendered.
        comments: offsets of comments that have not been put back yet.
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
        """The connection, as long as no byte of the answer is on it; else None."""
        return None if max(self.position, self.num_written) > 0 else self.transport

    def write(self, data: bytes) -> None:
        """Write what is new of `data`: the head, a chunk, or a whole body."""
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
        """Cut the connection: what is rendered here is not what was written, so nothing may follow it."""
        log.error("an inherited answer is cut: %s", why)
        self.transport.abort()


class WrittenHead:
    """A transport for the head of one response: it keeps the bytes."""

    def __init__(self) -> None:
        self.head = b""

    def write(self, data: bytes) -> None:
        self.head += data
