"""Committed state of requests: their tokens and where they are held.

It is read from the request's hash and string, and from the log of the worker that holds it. Gateways fill
gaps with it and the batcher resumes requests with it, so both see the same.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from common.broker.keys import request_keys
from common.broker.lua import call_script
from common.broker.pool_client import PoolClient
from common.messages.codec import WireError, decode
from common.messages.events import Events, Tokens, pack_tokens
from common.messages.records import RECORD

T = TypeVar("T")
LogItem = tuple[bytes, dict[bytes, bytes]]

FIELDS = (
    "digest worker attempt base crash_count cancel terminal num_tokens error error_type width prompt cached "
    "counted"
).split()
"""Fields of a request's hash, as `parse_state` takes them."""


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

    A spill moves tokens from log to string, so logs are read first: what is in neither then came later. A
    plan moves a request to another worker at any time: then all is read again.
    """
    offsets = dict.fromkeys(request_ids, 0)
    workers: set[str] = set()
    while True:
        logs = [await pool.redis.xrange(pool.keys.log(worker)) for worker in sorted(workers)]
        states = await read_slice(pool, offsets, of_ended=True)
        holders = {state.worker for state in states.values() if state.worker and not state.terminal}
        if holders <= workers:
            for entries in logs:
                append_tokens(log_tokens(entries), states)
            return states
        workers = holders


def parse_state(fields: list[bytes | None], records: bytes) -> Committed:
    """Return the state of a request from its FIELDS and its string."""
    digest, worker, attempt, base, crashes, cancel, terminal, num_tokens, *rest = fields
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
    state.records = records[: len(records) // state.token_bytes * state.token_bytes]
    state.spilled_bytes = len(state.records)
    return state


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


async def read_slice(
    pool: PoolClient, offsets: Mapping[str, int | None] | Mapping[str, int], of_ended: bool
) -> dict[str, Committed]:
    """Return the state of each request.

    Args:
        offsets: the first byte of the tokens that are read, by request id; None reads no tokens.
        of_ended: whether the tokens of a request that has ended are read, too, and then all of them.
    """
    first_bytes = ["" if offset is None else offset for offset in offsets.values()]
    call = call_script(
        "read_requests",
        lambda reply: [parse_state(fields, records) for *fields, records in reply],
        pool.keys,
        args={"which": "all" if of_ended else "live", "num_fields": len(FIELDS)},
        more_keys=request_keys(pool.keys, offsets),
        more_args=[*FIELDS, *first_bytes],
    )
    states = await pool.run(call)
    return dict(zip(offsets, states, strict=True))
