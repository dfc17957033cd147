"""Prefill budget: how many tokens of prompts a step may compute beside rows that decode.

Usually as many as INTER_TOKEN_LATENCY_TARGET_MS leaves, so that running answers go on evenly. Whole steps,
MAX_BATCH_PREFILL_TOKENS, where prompts have the greater claim: while answers that were interrupted are
computed again, since these stand still meanwhile; and when TGI's WAITING_SERVED_RATIO and MAX_WAITING_TOKENS
say so.
"""

from itertools import islice

from batcher.scheduling.replica import Replica, WorkerLimits


def mixed_prefill_tokens(replica: Replica) -> int:
    """Return the most prompt tokens of a step in which rows decode, up to the next plan."""
    limits, most = replica.limits, replica.capacity.max_batch_prefill_tokens
    if any(row.was_interrupted for row in islice(replica.running, limits.max_batch_size)):
        return most
    if limits.waiting_served_ratio is not None or limits.max_waiting_tokens is not None:
        for row in islice(replica.running, limits.max_batch_size, None):
            row.added_at = replica.step  # a row that stands by waits for a place, not for its prefill
        rows = list(islice(replica.running, limits.max_batch_size))
        ages = [replica.step - row.added_at for row in rows if not row.is_prefilled]
        if takes_whole_steps(limits, ages, len(rows) - len(ages)):
            return most
    return replica.pace.times.prefill_tokens(limits.inter_token_target_ms, most)


def takes_whole_steps(limits: WorkerLimits, ages: list[int], num_decoding: int) -> bool:
    """Whether prompts take whole steps: there are enough of them for the rows that decode, or one of them has
    waited long enough.

    `ages` has for each row whose prompt is not computed how many steps ago it started.
    """
    ratio, most_steps = limits.waiting_served_ratio, limits.max_waiting_tokens
    if not ages:
        return False
    are_many = ratio is not None and len(ages) >= ratio * num_decoding
    return are_many or (most_steps is not None and max(ages) >= most_steps)
