"""Scripts of the batcher: one function for each Lua script that batchers run."""

from collections.abc import Mapping, Sequence
from typing import Any

from common.broker.committed import Committed
from common.broker.heartbeat import ProcessBeat
from common.broker.keys import STREAMS_TTL_MS, TOKENS_TTL_MS, Keys, request_keys
from common.broker.lua import Args, Argument, Fields, ScriptCall, call_script, in_pairs
from common.messages.codec import encode
from common.messages.events import Terminal
from common.messages.plan import Plan


def publish_plan(keys: Keys, worker: str, *, plan: Plan, oldest: int) -> ScriptCall[tuple[str, list[int]]]:
    """Publish a plan, and set the worker of the rows that start with it. A repeated call changes nothing: the
    plan's id is its number.

    The reply is `OK`, `MISSING`, `SEALED`, `FENCED`, `GAP` or `refused`, and with that the positions of the
    rows that are cancelled or have ended.

    Args:
        oldest: number of the oldest plan to keep.
    """
    return call_script(
        "publish_plan",
        read_plan_reply,
        keys,
        worker,
        args={
            "plan_id": f"{plan.epoch}-{plan.number}",
            "payload": encode(plan),
            "oldest": f"{plan.epoch}-{oldest}",
            "ttl_ms": STREAMS_TTL_MS,
            "incarnation": worker,
        },
        more_keys=[keys.request(row.request.request_id) for row in plan.starts],
        more_args=[part for row in plan.starts for part in (row.attempt, row.base, row.num_cached)],
    )


def read_plan_reply(reply: list[Any]) -> tuple[str, list[int]]:
    status, *rest = reply
    return status.decode(), [number - 1 for number in rest] if status == b"refused" else []


def dequeue(keys: Keys, entries: Sequence[tuple[str, str]]) -> ScriptCall[list[int]]:
    """Remove the entries of ended requests from the queue. 0 for each that has not ended.

    Args:
        entries: (request id, id of its entry).
    """
    names, ids = [name for name, _ in entries], [entry_id for _, entry_id in entries]
    return call_script("dequeue", list, keys, more_keys=request_keys(keys, names), more_args=ids)


def finish(
    keys: Keys, end: Terminal, *, own_epoch: int, kept_ms: int, channel: str, payload: bytes
) -> ScriptCall[str]:
    """Set and publish the terminal of a request that no worker holds. The reply is `OK`, `ENDED` if it has
    ended already, or `FENCED`.
    """
    args: Args = {
        "own_epoch": own_epoch,
        "reason": end.reason,
        "num_tokens": end.num_tokens,
        "error_text": end.error,
        "error_type": end.error_type,
        "kept_ms": kept_ms,
        "channel": channel,
        "payload": payload,
    }
    return call_script("finish", bytes.decode, keys, end.request_id, args=args)


def save_committed(
    keys: Keys, *, own_epoch: int, states: Mapping[str, Committed], worker: str = ""
) -> ScriptCall[str]:
    """Save what the log of a worker has of requests that it no longer holds. The reply is `OK` or `FENCED`.

    Args:
        states: by request id, with the death of this worker in `crash_count`.
        worker: the one; empty: that which holds each of them.
    """
    more_args: list[Argument] = []
    for state in states.values():
        own = state.records[state.spilled_bytes :]
        more_args += [worker or state.worker, state.attempt, state.crash_count, state.spilled_bytes, own]
        more_args.append(state.num_speculated)
    return call_script(
        "save_committed",
        bytes.decode,
        keys,
        args={"own_epoch": own_epoch, "ttl_ms": TOKENS_TTL_MS},
        more_keys=request_keys(keys, states),
        more_args=more_args,
    )


def publish_state(
    keys: Keys, beat: ProcessBeat, *, oldest: str, state_ttl_ms: int, counts: Fields
) -> ScriptCall[object]:
    """Write the counts of the active batcher, and its heartbeat.

    Args:
        oldest: id of the oldest message of `control` to keep.
    """
    args: Args = {"oldest": oldest, "state_ttl_ms": state_ttl_ms, "num_counts": len(counts), **beat.args}
    more = [*in_pairs(counts), *in_pairs(beat.fields)]
    return call_script("publish_state", int, keys, beat.kind, beat.name, args=args, more_args=more)
