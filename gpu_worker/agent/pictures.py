"""Pictures on their way from the broker to the engine: the bytes of those that a row must still compute."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

from common.broker.client import FailureLog
from common.broker.pool_client import PoolClient
from common.messages.plan import NewRow
from common.messages.request import Picture
from gpu_worker.agent.engine_client import EngineClient
from gpu_worker.protocol import StartRow

log = logging.getLogger(__name__)

RETRY_S = 0.05
MAX_CACHED_BYTES = 32 * 2**20
"""Of pictures that were read last: choices of one prompt, and further requests with them, read none again."""
MAX_GRANT_BYTES = 64 * 2**20
"""Of pictures in one grant, unless one row has more."""


class PictureReader:
    """Reads the bytes of pictures.

    Attributes:
        engine: says whether rows need those among cached tokens, too.
        contents: digest → bytes: those that the next rows need, and the ones that were used last.
    """

    def __init__(self, pool: PoolClient, engine: EngineClient) -> None:
        self.pool = pool
        self.engine = engine
        self.contents: OrderedDict[str, bytes] = OrderedDict()
        self.failures = FailureLog(log, "reading pictures")

    def needed_by(self, start: NewRow) -> list[Picture]:
        """The pictures of a row that its engine must see: those that have a token whose KV is not cached."""
        num_cached = 0 if self.engine.all_pictures else start.num_cached
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

    def of_row(self, start: NewRow) -> list[tuple[int, int, str, bytes]] | None:
        """`StartRow.pictures` of a row; None if the broker has lost one of them."""
        needed = self.needed_by(start)
        if any(picture.digest not in self.contents for picture in needed):
            return None
        return [(one.start, one.num_tokens, one.digest, self.contents[one.digest]) for one in needed]


def in_grants(starts: Sequence[StartRow]) -> Iterator[list[StartRow]]:
    """Yield the rows in order, in lists whose pictures fit into one grant each; one list at least."""
    rows: list[StartRow] = []
    num_bytes = 0
    for start in starts:
        size = sum(len(content) for *_, content in start.pictures)
        if rows and num_bytes + size > MAX_GRANT_BYTES:
            yield rows
            rows, num_bytes = [], 0
        rows.append(start)
        num_bytes += size
    yield rows
