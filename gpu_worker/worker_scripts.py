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


class FlushedTerminal(NamedTuple):
    """The end of a request on its worker, as `finish` takes it; `base`: where the attempt began. Of this
    attempt's tokens, `num_speculated` needed no step of their own, here and below.
    """

    request_id: str
    attempt: int
    base: int
    end: Terminal
    records: bytes
    kept_ms: int
    channel: str
    payload: bytes
    num_speculated: int = 0

    @property
    def args(self) -> tuple[Argument, ...]:
        end = self.end
        kept = (end.reason, end.num_tokens, end.error, end.error_type, kept_records(end, self.records))
        return (self.attempt, self.base, *kept, self.kept_ms, self.channel, self.payload, self.num_speculated)


class FlushedSpill(NamedTuple):
    """Tokens that are copied to their request's string, from byte `offset` on."""

    request_id: str
    attempt: int
    base: int
    offset: int
    records: bytes
    num_speculated: int = 0


class FlushedCount(NamedTuple):
    """How many tokens a request has whose API key has a budget."""

    key_id: str
    request_id: str
    attempt: int
    base: int
    num_tokens: int
    num_speculated: int = 0


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
    terminals: Sequence[FlushedTerminal],
    spills: Sequence[FlushedSpill],
    counts: Sequence[FlushedCount] = (),
) -> ScriptCall[FlushReply]:
    """Append a flush to log and reports, then publish it.

    Args:
        report: b"" for none.
        acknowledged: the last report that the batcher has applied.
        mode: `trim` trims the log, `whole` follows whatever it has, or "".
        prompts: request and records of the prompt's tokens of each.
        messages: channel, payload of each; without a channel only the log has it.
    """
    more_keys = [keys.request(request_id) for request_id, _ in prompts]
    more_keys += request_keys(keys, [one.request_id for part in (terminals, spills) for one in part])
    more_keys += [keys.request(one.request_id) for one in counts]
    more_args: list[Argument] = [part for message in messages for part in message]
    more_args += [records for _, records in prompts]
    more_args += [part for end in terminals for part in end.args]
    more_args += [part for spilled in spills for part in spilled[1:]]
    more_args += [part for one in counts for part in one[2:]]
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


def write_logits(
    keys: Keys,
    worker: str,
    request_id: str,
    *,
    attempt: int,
    base: int,
    place: int,
    num_rows: int,
    values: bytes,
    ttl_ms: int,
) -> ScriptCall[int | str]:
    """Append one piece of a request's logits. The reply is 1, LOGITS_LOST, LOGITS_REFUSED, `MISSING` or
    `SEALED`.

    Args:
        base: where the attempt began.
        place: of the first row among those that the request returns.
    """
    args: Args = {
        "worker": worker,
        "attempt": attempt,
        "base": base,
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
        more_keys=[keys.request(request_id), keys.logits(request_id)],
    )
