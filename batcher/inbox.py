"""Everything that the batcher hears, read with one XREAD: requests, control, and the reports of every worker."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis

COUNT = 256


@dataclass(frozen=True, slots=True)
class Entry:
    """One stream entry. `fields` has one field, named after the kind of message."""

    stream: str
    id: str
    fields: dict[bytes, bytes]

    @property
    def kind(self) -> str:
        return next(iter(self.fields), b"").decode(errors="replace")

    @property
    def data(self) -> bytes:
        return next(iter(self.fields.values()), b"")


class Inbox:
    """The streams that are followed, and how far each has been read."""

    def __init__(self, redis: Redis) -> None:
        self.redis = redis
        self.read_to: dict[str, str] = {}

    def follow(self, stream: str, after: str = "0") -> None:
        self.read_to.setdefault(stream, after)

    def drop(self, stream: str) -> None:
        self.read_to.pop(stream, None)

    async def read(self, wait_ms: int) -> list[Entry]:
        """New entries of all streams, oldest first in each; waits up to `wait_ms` when there are none."""
        streams: Any = dict(self.read_to)
        answer = await self.redis.xread(streams, count=COUNT, block=max(1, wait_ms))
        return list(self.entries(answer))

    def entries(self, answer: list[tuple[bytes, list[tuple[bytes, dict[bytes, bytes]]]]]) -> Iterator[Entry]:
        for stream, items in answer:
            name = stream.decode()
            for entry_id, fields in items:
                self.read_to[name] = entry_id.decode()
                yield Entry(name, entry_id.decode(), fields)
