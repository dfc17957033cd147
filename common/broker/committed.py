"""Committed state of requests: their tokens and where they are held.

It is read from the request's hash and string, and from the log of the worker that holds it. Gateways fill
gaps with it and the batcher resumes requests with it, so both see the same.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from redis.exceptions import ResponseError

from common.broker import request_scripts
from common.broker.client import CONNECT_TIMEOUT_S
from common.broker.keys import SEALED
from common.broker.pool_client import PoolClient
from common.messages.codec import WireError, decode, from_map, unpack
from common.messages.events import Events, TokenColumns, Tokens, pack_tokens, single_token
from common.messages.records import RECORD

T = TypeVar("T")
LogItem = tuple[bytes, dict[bytes, bytes]]

REQUESTS_IN_ONE_READ = 256
SEALED_ENTRIES_IN_ONE_READ = 16
LOG_ENTRIES_IN_ONE_READ = 8
"""Each takes a gateway up to a millisecond."""
LOGITS_PIECES_IN_ONE_READ = 16
"""Of up to 4 MiB each."""
AFTER_SEAL = f"({2**64 - 1}-"
"""How a position after a seal begins: nothing follows it."""
FIELDS = (
    "digest worker attempt base crash_count cancel terminal num_tokens error error_type width prompt cached "
    "counted"
).split()
"""Fields of a request's hash, as `parse_state` takes them."""
NO_FIELDS: list[bytes | None] = [None] * len(FIELDS)


@dataclass(slots=True)
class Committed:
    """Committed state of one request.

    Attributes:
        known: whether the request exists; its keys expire some time after its end.
        terminal: why it ended; `num_final`, `error` and `error_type` are those of its terminal. `num_final`
            is -1 if the hash lacks it, since something else wrote to it.
        width: records of one token: its own, then one for each of the likeliest tokens.
        records: packed records of all committed tokens; none are kept of a request that ended without an
            answer.
        spilled_bytes: how many bytes of `records` are in the string.
        num_counted: tokens that usage has; `num_speculated` of the others needed no step of their own.
        prompt: packed records of the prompt's tokens but the first, if the request asks for them; they are
            committed with the first generated token.
        num_cached: prompt tokens whose KV was cached when the run began that makes the first token; None if
            that is not known.
    """

    known: bool = False
    worker: str = ""
    attempt: int = 0
    base: int = 0
    crash_count: int = 0
    cancelled: bool = False
    terminal: str = ""
    num_final: int = 0
    error: str = ""
    error_type: str = ""
    width: int = 1
    records: bytes = b""
    spilled_bytes: int = 0
    num_counted: int = 0
    num_speculated: int = 0
    prompt: bytes | None = None
    num_cached: int | None = None

    @property
    def is_live(self) -> bool:
        return self.known and not self.terminal

    @property
    def num_tokens(self) -> int:
        return len(self.records) // self.token_bytes

    @property
    def token_bytes(self) -> int:
        return RECORD.size * self.width

    def append(self, tokens: Tokens) -> None:
        """Append the `tokens` that are not here yet; ignore them if tokens before them are missing."""
        have = self.num_tokens - tokens.index
        if 0 <= have < len(tokens.ids) // 4:
            self.records += pack_tokens(tokens)[have * self.token_bytes :]
            self.num_speculated += tokens.num_speculated if tokens.index >= self.num_counted else 0


async def read(pool: PoolClient, request_ids: Iterable[str]) -> dict[str, Committed]:
    """Return the committed state of each request.

    A spill moves tokens from log to string, and a plan moves a request to another worker, at any time. So
    strings and logs are read in one transaction, and again if a request turns out to be on another worker.
    """
    request_ids = list(request_ids)
    workers: set[str] = set()
    while True:
        states = await read_once(pool, request_ids, sorted(workers))
        holders = {state.worker for state in states.values() if state.worker and not state.terminal}
        if holders <= workers:
            return states
        workers = holders


async def read_once(pool: PoolClient, request_ids: list[str], workers: list[str]) -> dict[str, Committed]:
    async with pool.redis.pipeline(transaction=True) as pipe:
        for request_id in request_ids:
            pipe.hmget(pool.keys.request(request_id), FIELDS)
            pipe.get(pool.keys.tokens(request_id))
        for worker in workers:
            pipe.xrange(pool.keys.log(worker))
        answers = [skip_wrong_type(answer) for answer in await pipe.execute(raise_on_error=False)]
    states = {
        request_id: parse_state(*answers[2 * i : 2 * i + 2]) for i, request_id in enumerate(request_ids)
    }
    for entries in answers[2 * len(request_ids) :]:
        append_tokens(log_tokens(entries or []), states)
    return states


def parse_state(fields: list[bytes | None] | None, records: bytes | None) -> Committed:
    """Return the state of a request from its FIELDS and its string."""
    digest, worker, attempt, base, crashes, cancel, terminal, num_tokens, *rest = fields or NO_FIELDS
    error, error_type, width, prompt, num_cached, num_counted = rest
    state = Committed(
        known=digest is not None,
        worker=(worker or b"").decode(),
        attempt=int(attempt or 0),
        base=int(base or 0),
        crash_count=int(crashes or 0),
        cancelled=cancel is not None,
        terminal=(terminal or b"").decode(),
        num_final=int(num_tokens or (-1 if terminal else 0)),
        error=(error or b"").decode(),
        error_type=(error_type or b"").decode(),
        width=int(width or 1),
        prompt=prompt,
        num_cached=None if num_cached is None else int(num_cached),
        num_counted=int(num_counted or 0),
    )
    if not records:
        return state
    state.records = records[: len(records) // state.token_bytes * state.token_bytes]
    state.spilled_bytes = len(state.records)
    return state


def skip_wrong_type(answer: Any) -> Any:
    """Return the answer, or None if the key has another type, which spoils its own request only. Raises any
    other error.
    """
    if isinstance(answer, ResponseError) and str(answer).startswith("WRONGTYPE"):
        return None
    if isinstance(answer, Exception):
        raise answer
    return answer


def log_tokens(entries: list[LogItem]) -> Iterator[Tokens]:
    """Yield the tokens in entries of a worker's log. A message that cannot be read is skipped."""
    for _, fields in entries:
        for message in logged_messages(fields):
            with contextlib.suppress(WireError):
                yield from decode(Events, message).all_tokens


def logged_messages(fields: dict[bytes, bytes]) -> Iterator[bytes]:
    """Yield the messages in one entry of a worker's log."""
    return (value for name, value in fields.items() if value and name.startswith(b"entry"))


def append_tokens(logged: Iterable[Tokens], states: dict[str, Committed]) -> None:
    """Append the tokens of a worker's log to the states of their requests. Tokens of an earlier attempt are
    in the string, or void.
    """
    for tokens in logged:
        state = states.get(tokens.request_id)
        if state is not None and tokens.attempt >= state.attempt:
            state.append(tokens)


async def read_saved(
    pool: PoolClient, request_ids: Iterable[str], with_tokens: bool = True
) -> dict[str, Committed]:
    """Return the state of each request without what only a log has.

    It is read in slices, so that neither broker nor caller is busy for long. `with_tokens`: the strings of
    live requests, too.
    """
    states: dict[str, Committed] = {}
    for names in in_slices(list(request_ids), REQUESTS_IN_ONE_READ):
        offsets = dict.fromkeys(names, 0 if with_tokens else None)
        states |= await read_slice(pool, offsets, of_ended=False)
    return states


async def read_tails(pool: PoolClient, offsets: Mapping[str, int]) -> dict[str, Committed]:
    """Return the state of each request without what only a log has, and of its string only the part from the
    given byte on. Of a request that has ended it is the whole string, so that a reader with other tokens
    notices.
    """
    async with asyncio.timeout(CONNECT_TIMEOUT_S):
        return await read_slice(pool, offsets, of_ended=True)


async def read_slice(
    pool: PoolClient, offsets: Mapping[str, int | None], of_ended: bool
) -> dict[str, Committed]:
    """Return the state of each request as `request_scripts.read_requests` reads it."""
    call = request_scripts.read_requests(pool.keys, offsets, fields=FIELDS, of_ended=of_ended)
    found = await pool.run(call)
    return {name: parse_state(*state) for name, state in zip(offsets, found, strict=True)}


async def read_logits(pool: PoolClient, request_id: str, num_bytes: int) -> bytes | None:
    """Return the first `num_bytes` of a request's logits, read in slices; None if there are fewer."""
    key, num_read = pool.keys.logits(request_id), 0
    pieces: list[bytes] = []
    while num_read < num_bytes:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            try:
                found = await pool.redis.lrange(  # type: ignore[misc]
                    key, len(pieces), len(pieces) + LOGITS_PIECES_IN_ONE_READ - 1
                )
            except ResponseError as error:
                found = skip_wrong_type(error) or []
        if not found:
            return None
        pieces += found
        num_read += sum(map(len, found))
    return b"".join(pieces)[:num_bytes]


async def read_sealed_log(pool: PoolClient, worker: str) -> tuple[list[Tokens], str]:
    """Return all tokens in a sealed worker's log, and why it was sealed; it is read in slices."""
    logged: list[Tokens] = []
    begin, why = "-", ""
    while entries := await pool.redis.xrange(pool.keys.log(worker), begin, count=SEALED_ENTRIES_IN_ONE_READ):
        logged += log_tokens(entries)
        last_id, fields = entries[-1]
        if last_id == SEALED.encode():
            why = fields.get(b"why", b"died").decode()
            break
        begin = f"({last_id.decode()}"
    return logged, why


def in_slices(items: list[T], size: int) -> Iterator[list[T]]:
    return (items[begin : begin + size] for begin in range(0, len(items), size))


async def read_log(pool: PoolClient, worker: str, after: int, until: int) -> AsyncIterator[bytes]:
    """Yield the messages of a worker's log after one flush up to another, or with 0 up to its end."""
    first, last = f"({after}-0", f"{until}-0" if until else "+"
    while True:
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                entries = await pool.redis.xrange(pool.keys.log(worker), first, last, LOG_ENTRIES_IN_ONE_READ)
        except ResponseError as error:
            entries = skip_wrong_type(error) or []
        for entry_id, fields in entries:
            first = f"({entry_id.decode()}"
            for message in logged_messages(fields):
                yield message
        if len(entries) < LOG_ENTRIES_IN_ONE_READ or first.startswith(AFTER_SEAL):
            return


def tokens_of(message: bytes, requests: Container[str]) -> list[Tokens]:
    """The tokens of those requests alone in a message of a log; none if it cannot be read."""
    try:
        fields = unpack(Events, message)
        tokens = [from_map(Tokens, item) for item in fields["t"] if item["id"] in requests]
        if columns := fields.get("c"):
            rows = from_map(TokenColumns, columns).rows()
            tokens += [single_token(*row) for row in rows if row[0] in requests]
        return tokens
    except (WireError, KeyError, TypeError):
        return []
