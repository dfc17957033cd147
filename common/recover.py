"""What is committed of a request: read from the string that outlives workers and from the log of the worker that holds it.

Gateways fill gaps with it, and the batcher resumes with it: one reading, so both see the same.
"""

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from common.codec import WireError, decode
from common.keys import Keys
from common.messages import RECORD, LogEntry, Tokens


@dataclass(slots=True)
class Committed:
    """State of one request as Redis has it.

    Attributes:
        known: whether the request exists at all (or has been settled and forgotten).
        records: packed `RECORD`s of tokens 0, 1, 2, …: all that is committed.
        spilled: how many of them stand in the string.
        result: the final answer (JSON bytes) once there is a terminal.
    """

    known: bool = False
    worker: str = ""
    attempt: int = 0
    base: int = 0
    strikes: int = 0
    cancelled: bool = False
    terminal: str = ""
    records: bytes = b""
    spilled: int = 0
    result: bytes | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.records) // RECORD.size

    def append(self, tokens: Tokens) -> None:
        """Adds what `tokens` knows beyond what is here already."""
        have = self.num_tokens - tokens.index
        if 0 <= have < len(tokens.ids) // 4:
            self.records += interleave(tokens.ids, tokens.logprobs)[have * RECORD.size :]


def interleave(ids: bytes, logprobs: bytes) -> bytes:
    """Packed records from packed ids and packed log-probabilities."""
    return b"".join(ids[i : i + 4] + logprobs[i : i + 4] for i in range(0, len(ids), 4))


def split(records: bytes) -> tuple[list[int], list[float]]:
    """Ids and log-probabilities of packed records."""
    pairs = list(struct.iter_unpack(RECORD.format, records))
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


async def read(redis: Redis, keys: Keys, request_ids: Iterable[str]) -> dict[str, Committed]:
    """What is committed of each request.

    A spill moves ids from log to string while we look, and a hand-over moves a request to another worker: so strings and logs are read in
    one transaction, and again when a request turned out to live elsewhere.
    """
    request_ids = list(request_ids)
    workers: set[str] = set()
    while True:
        reading = await read_once(redis, keys, request_ids, sorted(workers))
        homes = {state.worker for state in reading.values() if state.worker and not state.terminal}
        if homes <= workers:
            return reading
        workers = homes


async def read_once(redis: Redis, keys: Keys, request_ids: list[str], workers: list[str]) -> dict[str, Committed]:
    async with redis.pipeline(transaction=True) as pipe:
        for request_id in request_ids:
            pipe.hmget(keys.home(request_id), ["digest", "worker", "attempt", "base", "strikes", "cancel", "terminal"])
            pipe.get(keys.tokens(request_id))
            pipe.get(keys.result(request_id))
        for worker in workers:
            pipe.xrange(keys.log(worker))
        answers = [known_good(answer) for answer in await pipe.execute(raise_on_error=False)]
    reading: dict[str, Committed] = {}
    for i, request_id in enumerate(request_ids):
        home, records, result = answers[3 * i : 3 * i + 3]
        digest, worker, attempt, base, strikes, cancel, terminal = home or [None] * 7
        records = (records or b"")[: len(records or b"") // RECORD.size * RECORD.size]
        reading[request_id] = Committed(
            known=digest is not None,
            worker=(worker or b"").decode(),
            attempt=int(attempt or 0),
            base=int(base or 0),
            strikes=int(strikes or 0),
            cancelled=cancel is not None,
            terminal=(terminal or b"").decode(),
            records=records,
            spilled=len(records) // RECORD.size,
            result=result,
        )
    for entries in answers[3 * len(request_ids) :]:
        replay(entries or [], reading)
    return reading


def known_good(answer: Any) -> Any:
    """An answer, or None for a key of another type than ours: it spoils its own request and no other. Raises what else went wrong."""
    if isinstance(answer, ResponseError) and str(answer).startswith("WRONGTYPE"):
        return None
    if isinstance(answer, Exception):
        raise answer
    return answer


def replay(entries: list[tuple[bytes, dict[bytes, bytes]]], reading: dict[str, Committed]) -> None:
    """Adds the tokens of a worker's log, in order, to the requests of a reading."""
    for _, fields in entries:
        if (data := fields.get(b"entry")) is None:
            continue
        try:
            entry = decode(LogEntry, data)
        except WireError:
            continue
        for tokens in entry.tokens:
            if (state := reading.get(tokens.request_id)) is not None:
                state.append(tokens)
