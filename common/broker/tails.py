"""Logs in part: what a worker's log has behind the flushes that its reader has."""

import asyncio
from collections.abc import AsyncIterator, Container

from redis.exceptions import ResponseError

from common.broker.client import CONNECT_TIMEOUT_S
from common.broker.committed import logged_messages, skip_wrong_type
from common.broker.pool_client import PoolClient
from common.messages.codec import WireError, from_map, unpack
from common.messages.events import Events, Tokens

NUM_ENTRIES = 8
"""Entries of a log that are read at once: up to a millisecond of work each."""
SEAL = f"({2**64 - 1}-"
"""How the position behind a seal begins; nothing comes after it."""


async def read_log(pool: PoolClient, worker: str, after: int, until: int) -> AsyncIterator[bytes]:
    """Yield the messages of a worker's log after one flush up to another, or with 0 up to its end."""
    first, last = f"({after}-0", f"{until}-0" if until else "+"
    while True:
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                entries = await pool.redis.xrange(pool.keys.log(worker), first, last, NUM_ENTRIES)
        except ResponseError as error:
            entries = skip_wrong_type(error) or []
        for entry_id, fields in entries:
            first = f"({entry_id.decode()}"
            for message in logged_messages(fields):
                yield message
        if len(entries) < NUM_ENTRIES or first.startswith(SEAL):
            return


def tokens_of(message: bytes, requests: Container[str]) -> list[Tokens]:
    """The tokens of those requests alone in a message of a log; none if it cannot be read."""
    try:
        items = unpack(Events, message)["t"]
        return [from_map(Tokens, item) for item in items if item["id"] in requests]
    except (WireError, KeyError, TypeError):
        return []
