"""Scripts of workers: one function for each Lua script that workers run, and for those that end a worker."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from common.broker.keys import STREAMS_TTL_MS, TOKENS_TTL_MS, Keys, request_keys
from common.broker.lua import Args, Argument, Fields, ScriptCall, call_script, in_pairs
from common.messages.events import Terminal, kept_records


def create_logs(keys: Keys, worker: str, *, owner: str) -> ScriptCall[bool]:
    """Create log and reports of an incarnation. False if another owner has created them."""
    return call_script("create_logs", bool, keys, worker, args={"owner": owner, "ttl_ms": STREAMS_TTL_MS})


def worker_heartbeat(
    keys: Keys, worker: str, *, capacity: bytes, ttl_ms: int, state: str, step: int, fields: Fields
) -> ScriptCall[str]:
    """Write a worker's heartbeat. The reply is `OK`, `DRAIN`, `SEALED` or `MISSING`."""
    args: Args = {
        "incarnation": worker,
        "ttl_ms": ttl_ms,
        "streams_ttl_ms": STREAMS_TTL_MS,
        "state": state,
        "step": step,
        "capacity": capacity,
    }
    return call_script("worker_heartbeat", bytes.decode, keys, worker, args=args, more_args=in_pairs(fields))


class FlushedRow(NamedTuple):
    """What a flush, or `write_logits`, writes of a row: of one attempt of its request.

    Attributes:
        base: where the attempt began.
        fields: of a terminal those of `ended`; of a spill the byte from which on it copies records to the
            request's string, and these; of a count the number of tokens.
        num_speculated: tokens of this attempt that needed no step of their own.
    """

    request_id: str
    attempt: int
    base: int
    fields: tuple[Argument, ...]
    num_speculated: int = 0


def ended(
    end: Terminal, records: bytes, kept_ms: int, channel: str, payload: bytes, num_used: int
) -> tuple[Argument, ...]:
    """Fields of a terminal, as `finish` takes them. `num_used`: tokens that its API key pays for."""
    kept = (end.reason, end.num_tokens, end.error, end.error_type, kept_records(end, records))
    return (*kept, kept_ms, channel, payload, num_used)


class FlushReply(NamedTuple):
    """Whether a flush was written.

    Attributes:
        status: `OK`, `GAP`, `MISSING` or `SEALED`.
        results: for each spill 1, 0 where it would leave a hole, or -1 where it was refused; then for each
            count the tokens that the request's API key may still get, 0 or less for none.
    """

    status: str
    results: list[int]


def flush(
    keys: Keys,
    worker: str,
    *,
    sequence: int,
    report: bytes,
    acknowledged: int,
    mode: str,
    messages: Sequence[tuple[str, bytes]],
    prompts: Sequence[tuple[str, bytes]],
    terminals: Sequence[FlushedRow],
    spills: Sequence[FlushedRow],
    counts: Sequence[FlushedRow] = (),
) -> ScriptCall[FlushReply]:
    """Append a flush to log and reports, then publish it.

    Args:
        report: b"" for none.
        acknowledged: the last report that the batcher has applied.
        mode: `trim` trims the log, `whole` follows whatever it has, or "".
        prompts: request and records of the prompt's tokens of each.
        messages: channel, payload of each; without a channel only the log has it.
        counts: of rows whose API keys have budgets.
    """
    more_keys = [keys.request(request_id) for request_id, _ in prompts]
    more_keys += request_keys(keys, [one.request_id for part in (terminals, spills) for one in part])
    more_keys += [keys.request(one.request_id) for one in counts]
    more_args: list[Argument] = [part for message in messages for part in message]
    more_args += [records for _, records in prompts]
    for _, attempt, base, fields, num_speculated in (*terminals, *spills, *counts):
        more_args += attempt, base, *fields, num_speculated
    args: Args = {
        "sequence": sequence,
        "report": report,
        "oldest": f"{acknowledged}-0",
        "ttl_ms": TOKENS_TTL_MS,
        "worker": worker,
        "num_messages": len(messages),
        "num_prompts": len(prompts),
        "num_terminals": len(terminals),
        "num_spills": len(spills),
        "num_counts": len(counts),
        "mode": mode,
    }
    return call_script(
        "flush", read_flush_reply, keys, worker, args=args, more_keys=more_keys, more_args=more_args
    )


def read_flush_reply(reply: list[Any]) -> FlushReply:
    return FlushReply(reply[0].decode(), reply[1:])


LOGITS_LOST, LOGITS_REFUSED = 0, -1
"""Replies of `write_logits`: rows before these are missing; the request is not this worker's any more."""


def write_logits(keys: Keys, worker: str, piece: FlushedRow, *, ttl_ms: int) -> ScriptCall[int | str]:
    """Append one piece of a request's logits: its fields are the place of the first row among those that the
    request returns, the number of rows, and their values. The reply is 1, LOGITS_LOST, LOGITS_REFUSED,
    `MISSING` or `SEALED`.
    """
    place, num_rows, values = piece.fields
    args: Args = {
        "worker": worker,
        "attempt": piece.attempt,
        "base": piece.base,
        "place": place,
        "num_rows": num_rows,
        "values": values,
        "ttl_ms": ttl_ms,
    }
    return call_script(
        "write_logits",
        lambda reply: reply if isinstance(reply, int) else reply.decode(),
        keys,
        worker,
        args=args,
        more_keys=[keys.request(piece.request_id), keys.logits(piece.request_id)],
    )
