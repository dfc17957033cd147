"""Plans: what the next plan of one worker holds. Pure functions of a replica; they allocate its blocks."""

from collections.abc import Iterable
from dataclasses import dataclass

from batcher.scheduling.placement import importance, preempt_for
from batcher.scheduling.replica import Replica, WorkerLimits
from batcher.scheduling.sequence import PREEMPT, PlacedRow
from common.messages.plan import NewRow, Plan
from common.messages.records import pack_ids

BACKPRESSURE, WAIT_EXCEEDED, CHUNKING = "backpressure", "wait_exceeded", "chunking"
"""Why prompts join rows that decode, as TGI counts it: by WAITING_SERVED_RATIO, by MAX_WAITING_TOKENS, or in
chunks beside them.
"""


def mixed_prefill_tokens(replica: Replica) -> int:
    """Return the most prompt tokens of a step in which rows decode, up to the next plan.

    They are MAX_BATCH_PREFILL_TOKENS, or as many as INTER_TOKEN_LATENCY_TARGET_MS leaves, so that running
    answers go on evenly. With a target, prompts still get whole steps while an interrupted answer is computed
    again, since it stands still, and when TGI's WAITING_SERVED_RATIO or MAX_WAITING_TOKENS says so.
    """
    limits, most = replica.limits, replica.capacity.max_batch_prefill_tokens
    replica.whole_steps_for = ""
    counts_waiting = limits.waiting_served_ratio is not None or limits.max_waiting_tokens is not None
    rows: list[PlacedRow] = []
    standing_by: list[PlacedRow] = []
    if replica.interrupted or counts_waiting:  # usually no row need be looked at
        rows, standing_by = replica.split_rows(replica.running)
    if any(row.was_interrupted for row in rows):
        return most
    if counts_waiting:
        for row in standing_by:
            row.added_at = replica.step  # a row that stands by waits for a place, not for its prefill
        ages = [replica.step - row.added_at for row in rows if not row.is_prefilled]
        replica.whole_steps_for = whole_steps_reason(limits, ages, len(rows) - len(ages))
        if replica.whole_steps_for:
            return most
    return replica.pace.times.prefill_tokens(limits.inter_token_target_ms, most)


def whole_steps_reason(limits: WorkerLimits, ages: list[int], num_decoding: int) -> str:
    """Why prompts take whole steps: enough of them wait for each row that decodes, or one has waited long
    enough; empty if they do not. `ages`: for each row whose prompt is not computed, how many steps ago it
    started.
    """
    ratio, most_steps = limits.waiting_served_ratio, limits.max_waiting_tokens
    if ages and ratio is not None and len(ages) >= ratio * num_decoding:
        return BACKPRESSURE
    if ages and most_steps is not None and max(ages) >= most_steps:
        return WAIT_EXCEEDED
    return ""


@dataclass(slots=True, eq=False)
class PendingPlan:
    """A plan that is not published yet. `rows` are those that start with it, in its order; `joins` is why
    prompts join others with it.
    """

    replica: Replica
    plan: Plan
    rows: list[PlacedRow]
    joins: str = ""


def next_plan(
    replica: Replica, epoch: int, starting: list[PlacedRow], has_callers: bool = False
) -> Plan | None:
    """Return a plan with the new rows, stops, blocks and steps; None if there are none."""
    needs_grant = replica.needs_grant
    blocks = grow_rows(replica, starting) if needs_grant else []
    stops = stop_rows(replica, starting)
    if not (starting or needs_grant or stops):
        return None
    if needs_grant:
        replica.until = max(replica.until, replica.step + replica.horizon)
        replica.report_at = replica.until - replica.horizon // 2
        replica.is_short = False
    replica.plan += 1
    before, mixed_tokens = replica.whole_steps_for, mixed_prefill_tokens(replica)
    joins = bool(starting) or replica.whole_steps_for not in ("", before)
    is_decoding = joins and any(row.is_prefilled for row in replica.running)
    replica.joins = (replica.whole_steps_for or CHUNKING) if is_decoding else ""
    return Plan(
        epoch=epoch,
        number=replica.plan,
        until=replica.until,
        prefill_tokens=replica.capacity.max_batch_prefill_tokens,
        mixed_prefill_tokens=mixed_tokens,
        starts=[new_row(row) for row in starting],
        blocks=blocks,
        stops=stops,
        acknowledged=replica.acknowledged,
        max_rows=replica.limits.max_batch_size,
        report_at=replica.report_at,
        bulk_tokens=replica.pace.times.least_tokens if has_callers else 0,
    )


def set_lengths(replica: Replica, lengths: Iterable[tuple[int, int, int]]) -> None:
    """Note the lengths of rows that got several tokens in a step, or missed steps. A grant is due if half a
    horizon would fill a row's blocks.
    """
    for number, kv_len, step in lengths:
        if (row := replica.rows.get(number)) is None or row.ended:
            continue
        row.kv_len = kv_len
        row.at_step = step
        sequence, block_size = row.sequence, replica.block_size
        slots_left = sequence.kv_room(len(row.blocks), block_size) - kv_len
        needs_more = len(row.blocks) < sequence.blocks_for(sequence.max_kv, block_size)
        replica.is_short |= needs_more and slots_left <= replica.horizon // 2


def grow_rows(replica: Replica, starting: list[PlacedRow]) -> list[tuple[int, bytes]]:
    """Allocate blocks for the steps about to be granted. Return (row, packed numbers) of each row that grows.

    When blocks run out, the most important rows get theirs first, and the least important one is preempted.
    """
    horizon = replica.horizon
    step, block_size = replica.step, replica.block_size
    needs = {
        row: missing
        for row in replica.running
        if not row.stopping and row not in starting
        if (missing := row.num_missing(step + horizon, step, block_size)) > 0
    }
    replica.starved = not replica.pool.can_allocate(sum(needs.values()))
    grown = []
    for row in sorted(needs, key=importance) if replica.starved else needs:
        count = needs[row]
        if replica.starved:  # else there is enough for all
            if not replica.pool.can_allocate(count):
                preempt_for(replica, row)
            count = min(count, replica.pool.num_free)
        if count:
            blocks = replica.pool.allocate(count)
            row.blocks += blocks
            replica.reserve(row, horizon)
            grown.append((row.number, pack_ids(blocks)))
    return grown


def stop_rows(replica: Replica, starting: list[PlacedRow]) -> list[tuple[int, str]]:
    """Return (row, why) of the rows that must stop and were not asked to yet.

    A worker applies the stops of a plan before its starts, so a row that starts with this plan is stopped by
    the next plan.
    """
    stops = [(number, "takeover") for number in replica.disowned]
    replica.disowned = []
    due, replica.due_stops = replica.due_stops, []
    for row in due:
        leaves = replica.is_last and not row.sequence.request.gateway
        preempted = "preempted" if leaves or row.stopping == PREEMPT else ""
        why = row.sequence.stop_reason or preempted
        if not why or row.ended or row.stopping not in ("", PREEMPT):
            continue
        if row in starting:
            replica.due_stops.append(row)
        else:
            row.stopping = why
            stops.append((row.number, why))
    return stops


def new_row(row: PlacedRow) -> NewRow:
    sequence = row.sequence
    return NewRow(
        row.number,
        sequence.attempt,
        sequence.base,
        sequence.records,
        pack_ids(row.blocks),
        sequence.request,
        row.num_cached,
        is_suspect=sequence.crash_count > 0,
    )
