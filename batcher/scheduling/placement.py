"""Placement: which of the workers that can start a request gets it. A pure function of what they hold."""

import math
from collections.abc import Sequence as Many

from batcher.scheduling.replica import Replica
from batcher.scheduling.sequence import Sequence

SPREAD = 1.25
"""A worker gets no row for what it has cached if it has so many times the mean number of rows."""
ROW_TOKENS = 32
"""A row more weighs as much as so many tokens of the prompt that must be computed."""


def choose_replica(able: Many[Replica], sequence: Sequence) -> Replica:
    """Return the worker that has most of the request computed, unless others have far fewer rows.

    A worker without rows comes before one whose rows are more than its share, whatever is cached.
    """
    if len(able) == 1 or not sequence.block_hashes:
        return min(able, key=lambda replica: replica.load)
    most = math.ceil(SPREAD * (sum(replica.num_running for replica in able) + 1) / len(able))

    def cost(replica: Replica) -> tuple[int, tuple[int, int]]:
        cached = len(replica.cached_blocks(sequence)) * replica.block_size
        return ROW_TOKENS * replica.num_running - cached, replica.load

    return min((replica for replica in able if replica.num_running < most), key=cost)
