"""What is committed of a request: read from the string that outlives workers and from the log of the worker
that holds it.

Gateways fill gaps with it, and the batcher resumes with it: one reading, so both see the same.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from common.broker.keys import Keys
from common.messages.codec import WireError, decode
from common.messages.events import LogEntry, Tokens
from common.messages.records import RECORD, pack_tokens


@dataclass(slots=True)
class Committed:
    """State of one request as Redis has it.

    Attributes:
        known: whether the request exists at all (or has been settled and forgotten).
        width: `RECORD`s of one token: its own, then one for each of its likeliest tokens.
        records: packed, of tokens 0, 1, 2, …: all that is committed.
        spilled_bytes: how much of that stands in the string.
        prompt: packed records of the prompt's tokens but the first; there from the first token on, where the
            request asks for them.
        result: the final answer (JSON bytes) once there is a terminal.
    """

    known: bool = False
    worker: str = ""
    attempt: int = 0
    base: int = 0
    crash_count: int = 0
    cancelled: bool = False
    terminal: str = ""
    width: int = 1
    records: bytes = b""
    spilled_bytes: int = 0
    prompt: bytes | None = None
    result: bytes | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.records) // self.token_bytes

    @property
    def token_bytes(self) -> int:
        return RECORD.size * self.width

    def append(self, tokens: Tokens) -> None:
        """Adds what `tokens` knows beyond what is here already."""
        have = self.num_tokens - tokens.index
        if 0 <= have < len(tokens.ids) // 4:
            self.records += pack_tokens(tokens)[have * self.token_bytes :]


async def read(redis: Redis, keys: Keys, request_ids: Iterable[str]) -> dict[str, Committed]:
    """What is committed of each request.

    A spill moves ids from log to string while we look, and a hand-over moves a request to another worker: so
    strings and logs are read in one transaction, and again when a request turned out to live elsewhere.
    """
    request_ids = list(request_ids)
    workers: set[str] = set()
    while True:
        reading = await read_once(redis, keys, request_ids, sorted(workers))
        homes = {state.worker for state in reading.values() if state.worker and not state.terminal}
        if homes <= workers:
            return reading
        workers = homes


FIELDS = ["digest", "worker", "attempt", "base", "crash_count", "cancel", "terminal", "width", "prompt"]


async def read_once(
    redis: Redis, keys: Keys, request_ids: list[str], workers: list[str]
) -> dict[str, Committed]:
    async with redis.pipeline(transaction=True) as pipe:
        for request_id in request_ids:
            pipe.hmget(keys.request(request_id), FIELDS)
            pipe.get(keys.tokens(request_id))
            pipe.get(keys.result(request_id))
        for worker in workers:
            pipe.xrange(keys.log(worker))
        answers = [skip_wrong_type(answer) for answer in await pipe.execute(raise_on_error=False)]
    reading: dict[str, Committed] = {}
    for i, request_id in enumerate(request_ids):
        home, records, result = answers[3 * i : 3 * i + 3]
        digest, worker, attempt, base, crash_count, cancel, terminal, width, prompt = home or [None] * len(
            FIELDS
        )
        state = reading[request_id] = Committed(
            known=digest is not None,
            worker=(worker or b"").decode(),
            attempt=int(attempt or 0),
            base=int(base or 0),
            crash_count=int(crash_count or 0),
            cancelled=cancel is not None,
            terminal=(terminal or b"").decode(),
            width=int(width or 1),
            prompt=prompt,
            result=result,
        )
        records = records or b""
        state.records = records[: len(records) // state.token_bytes * state.token_bytes]
        state.spilled_bytes = len(state.records)
    for entries in answers[3 * len(request_ids) :]:
        replay(entries or [], reading)
    return reading


def skip_wrong_type(answer: Any) -> Any:
    """An answer, or None for a key of another type than ours: it spoils its own request and no other. Raises
    what else went wrong.
    """
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
