"""Pictures on their way from the broker to the engine: the bytes of those that a row must still compute."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import replace

from common.broker.client import FailureLog
from common.broker.pool_client import PoolClient
from common.messages.plan import NewRow, Plan
from common.messages.request import Picture

log = logging.getLogger(__name__)

RETRY_S = 0.05
MAX_CACHED_BYTES = 32 * 2**20
"""Of pictures that were read last: choices of one prompt, and further requests with them, read none again."""
MAX_FRAME_PICTURES = 64 * 2**20
"""Bytes of pictures in one frame, unless one row has more."""


class PictureReader:
    """Reads the bytes of pictures.

    Attributes:
        needs_all: rows need those among cached tokens, too.
        contents: digest → bytes: those that the next rows need, and the ones that were used last.
    """

    def __init__(self, pool: PoolClient, needs_all: bool) -> None:
        self.pool = pool
        self.needs_all = needs_all
        self.contents: OrderedDict[str, bytes] = OrderedDict()
        self.failures = FailureLog(log, "reading pictures")

    def needed_by(self, start: NewRow) -> list[Picture]:
        """The pictures of a row that its engine must see: those that have a token whose KV is not cached."""
        num_cached = 0 if self.needs_all else start.num_cached
        return [one for one in start.request.pictures if one.start + one.num_tokens > num_cached]

    async def read_for(self, starts: Iterable[NewRow]) -> None:
        """Read what these rows need, in one round trip, however long the broker is away."""
        needed = {picture.digest: None for start in starts for picture in self.needed_by(start)}
        if not needed:
            return
        self.drop_oldest(keep=needed)
        missing = [digest for digest in needed if digest not in self.contents]
        while missing:
            with self.failures.caught():
                found = await self.pool.redis.mget([self.pool.keys.picture(digest) for digest in missing])
                self.contents |= {digest: one for digest, one in zip(missing, found, strict=True) if one}
                return
            await asyncio.sleep(RETRY_S)

    def drop_oldest(self, keep: Iterable[str]) -> None:
        """Make the bytes that are kept the newest, and drop the oldest of the others beyond the bound."""
        wanted = [digest for digest in keep if digest in self.contents]
        for digest in wanted:
            self.contents.move_to_end(digest)
        num_bytes = sum(map(len, self.contents.values()))
        for digest in [*self.contents][: len(self.contents) - len(wanted)]:
            if num_bytes <= MAX_CACHED_BYTES:
                return
            num_bytes -= len(self.contents.pop(digest))

    def of_row(self, start: NewRow) -> list[bytes] | None:
        """`NewRow.contents`; None if the broker has lost a picture that is needed."""
        needed = {one.digest for one in self.needed_by(start)}
        if not needed <= self.contents.keys():
            return None
        return [self.contents[one.digest] if one.digest in needed else b"" for one in start.request.pictures]


def in_parts(plan: Plan) -> Iterator[Plan]:
    """Yield the plan in parts whose pictures fit into one frame each; stops and blocks are in the first."""
    rows: list[NewRow] = []
    num_bytes = 0
    for start in plan.starts:
        size = sum(map(len, start.contents))
        if rows and num_bytes + size > MAX_FRAME_PICTURES:
            yield replace(plan, starts=rows)
            plan, rows, num_bytes = replace(plan, blocks=[], stops=[]), [], 0
        rows.append(start)
        num_bytes += size
    yield replace(plan, starts=rows)
