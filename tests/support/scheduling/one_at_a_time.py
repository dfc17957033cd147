"""An obvious scheduler: one request after the other, alone on one worker, from first token to last."""

import random
from collections.abc import Iterable
from itertools import count

from common.messages.plan import NewRow, Plan
from common.messages.records import pack_ids
from common.messages.request import Generate
from tests.support.fleet.simulated_worker import SimulatedWorker

BLOCK_SIZE = 16


def completions(requests: Iterable[Generate], eos_chance: float) -> dict[str, int]:
    """How many tokens each request generates."""
    worker = SimulatedWorker(BLOCK_SIZE, random.Random(1), eos_chance)
    for number, request in enumerate(requests, 1):
        blocks = pack_ids(range(1, 2 + request.max_kv // BLOCK_SIZE))
        start = NewRow(number, 1, 0, b"", blocks, request)
        worker.apply_plan(Plan(1, number, until=10**9, prefill_tokens=10**9, starts=[start], max_rows=1))
        for _ in count():
            if not worker.run():
                break
        while worker.leaving:
            worker.release()
    return worker.committed
