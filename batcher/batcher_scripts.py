"""Scripts of the batcher: one function for each Lua script that batchers run; and heartbeats of processes."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from common.broker.heartbeat import ProcessBeat
from common.broker.keys import STREAMS_TTL_MS, TOKENS_TTL_MS, Keys, request_keys
from common.broker.lua import Args, Fields, ScriptCall, call_script, in_pairs
from common.messages.codec import encode
from common.messages.events import Terminal, kept_records
from common.messages.plan import Plan


class PlanReply(NamedTuple):
    """Whether a plan was written.

    Attributes:
        status: `OK`, `MISSING`, `SEALED`, `FENCED`, `GAP` or `refused`.
        refused: positions, from 0, of the rows that are cancelled or have ended.
    """

    status: str
    refused: Sequence[int] = ()


def publish_plan(keys: Keys, worker: str, *, plan: Plan, oldest: int) -> ScriptCall[PlanReply]:
    """Publish a plan, and set the worker of the rows that start with it. A repeated call changes nothing: the
    plan's id is its number.

    Args:
        oldest: number of the oldest plan to keep.
    """
    args: Args = {
        "plan_id": f"{plan.epoch}-{plan.number}",
        "payload": encode(plan),
        "oldest": f"{plan.epoch}-{oldest}",
        "ttl_ms": STREAMS_TTL_MS,
        "incarnation": worker,
    }
    return call_script(
        "publish_plan",
        read_plan_reply,
        keys,
        worker,
        args=args,
        more_keys=[keys.request(row.request.request_id) for row in plan.starts],
        more_args=[part for row in plan.starts for part in (row.attempt, row.base, row.num_cached)],
    )


def read_plan_reply(reply: list[Any]) -> PlanReply:
    status, *rest = reply
    return PlanReply(status.decode(), [number - 1 for number in rest] if status == b"refused" else ())


class QueuedRequest(NamedTuple):
    """A request, and its entry in the queue."""

    request_id: str
    entry_id: str


def dequeue(keys: Keys, *requests: QueuedRequest) -> ScriptCall[list[bool]]:
    """Remove the entries of ended requests from the queue. False for each that has not ended."""
    return call_script(
        "dequeue",
        read_flags,
        keys,
        more_keys=request_keys(keys, [one.request_id for one in requests]),
        more_args=[one.entry_id for one in requests],
    )


def read_flags(reply: list[int]) -> list[bool]:
    return [bool(flag) for flag in reply]


def finish(
    keys: Keys, end: Terminal, *, records: bytes, kept_ms: int, channel: str, payload: bytes
) -> ScriptCall[bool]:
    """Set and publish the terminal of a request that no worker holds. False if it has ended already."""
    args: Args = {
        "reason": end.reason,
        "num_tokens": end.num_tokens,
        "error_text": end.error,
        "error_type": end.error_type,
        "records": kept_records(end, records),
        "kept_ms": kept_ms,
        "channel": channel,
        "payload": payload,
    }
    return call_script("finish", bool, keys, end.request_id, args=args)


class SavedRequest(NamedTuple):
    """What a worker's log has of a request.

    Attributes:
        worker: that no longer holds the request, in this attempt.
        crash_count: including this worker's death.
        offset: the first byte of `records` in the request's string.
        num_speculated: those of the tokens that are not counted yet that needed no step of their own.
    """

    request_id: str
    worker: str
    attempt: int
    crash_count: int
    offset: int
    records: bytes
    num_speculated: int = 0


def save_committed(keys: Keys, *, own_epoch: int, requests: Sequence[SavedRequest]) -> ScriptCall[str]:
    """Save what the log of a worker has of requests. The reply is `OK` or `FENCED`."""
    return call_script(
        "save_committed",
        bytes.decode,
        keys,
        args={"own_epoch": own_epoch, "ttl_ms": TOKENS_TTL_MS},
        more_keys=request_keys(keys, [one.request_id for one in requests]),
        more_args=[part for one in requests for part in one[1:]],
    )


def publish_state(
    keys: Keys, beat: ProcessBeat, *, oldest: str, state_ttl_ms: int, counts: Fields
) -> ScriptCall[None]:
    """Write the counts of the active batcher, and its heartbeat.

    Args:
        oldest: id of the oldest message of `control` to keep.
    """
    args: Args = {"oldest": oldest, "state_ttl_ms": state_ttl_ms, "num_counts": len(counts), **beat.args}
    return call_script(
        "publish_state",
        lambda _: None,
        keys,
        beat.kind,
        beat.name,
        args=args,
        more_args=[*in_pairs(counts), *in_pairs(beat.fields)],
    )
