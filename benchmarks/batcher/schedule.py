"""Prints how the scheduler keeps up with a fixed trace:
`python -m benchmarks.batcher.schedule [--minutes 60]`.

The scheduler runs alone in simulated time, with WORKERS workers of ROWS rows and steps of STEP_MS. Requests
come at random, at LOAD of what these can do. Prompts have 512 tokens, a fifth of them begin as others do;
answers have a geometric length of 128 on average. Exit status 1 if the scheduler needs more than MOST_CPU
seconds of one core for 1,000 requests, if one in a hundred waits longer than MOST_WAIT_MS although there is
room, if less than LEAST_HITS of what prompts share is found computed, or if memory grows by more than
MOST_GROWTH between a quarter of the time and its end.
"""

import argparse
import os
import random
import sys
from array import array
from pathlib import Path

from batcher.scheduling.plan_builder import PendingPlan
from batcher.scheduling.replica import Replica, WorkerLimits
from batcher.scheduling.scheduler import Scheduler
from batcher.scheduling.sequence import Sequence
from benchmarks.batcher.lives import CostlessWorker, Stopwatch
from common.messages.block_hashes import HASH_BYTES, root_hash
from common.messages.plan import Report
from common.messages.records import pack_ids
from common.messages.request import Generate, StoppingParams
from tests.support.broker_state import make_capacity

WORKERS, ROWS, NUM_BLOCKS = 8, 64, 4500
STEP_MS, LOAD = 20.0, 0.8
PROMPT_TOKENS, SHARED_TOKENS, SHARING, NUM_SYSTEMS = 512, 256, 0.2, 16
MEAN_ANSWER, MAX_ANSWER = 128, 1024
MOST_CPU, MOST_WAIT_MS, LEAST_HITS, MOST_GROWTH = 0.3, 100.0, 0.9, 1.1


class Trace:
    """Requests that come at random, the same for each seed."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.prompt = pack_ids(range(PROMPT_TOKENS))
        self.systems = [self.draw.randbytes(SHARED_TOKENS // 16 * HASH_BYTES) for _ in range(NUM_SYSTEMS)]
        self.rate = LOAD * WORKERS * ROWS / (MEAN_ANSWER * STEP_MS)
        self.next_ms = 0.0
        self.count = self.num_sharing = 0

    def until(self, now_ms: float) -> list[Sequence]:
        """Return what has come up to this time."""
        new = []
        while self.next_ms <= now_ms:
            self.next_ms += self.draw.expovariate(self.rate)
            self.count += 1
            shares = self.draw.random() < SHARING
            self.num_sharing += shares
            shared = self.draw.choice(self.systems) if shares else b""
            own = self.draw.randbytes((PROMPT_TOKENS // 16) * HASH_BYTES - len(shared))
            hashes = root_hash("") + shared + own
            name = f"r{self.count}"
            stopping = StoppingParams(MAX_ANSWER)
            request = Generate(name, "d", self.prompt, stopping, gateway="g", block_hashes=hashes)
            new.append(Sequence(request, f"1000-{self.count}", 10**12))
        return new


class TimedPool:
    """A scheduler and its workers; all take their steps at once."""

    def __init__(self, seed: int) -> None:
        self.trace = Trace(seed)
        self.watch = Stopwatch()
        self.scheduler = Scheduler(WorkerLimits(ROWS, 32), 1)
        self.workers = {f"w{i}": CostlessWorker(random.Random(seed + i)) for i in range(WORKERS)}
        self.now_ms = 0.0
        self.came_ms: dict[str, float] = {}
        self.waits_ms = array("d")
        self.num_cached = 0
        for name in self.workers:
            capacity = make_capacity(name, NUM_BLOCKS, name=name, prefix_caching=True)
            self.scheduler.workers.add(Replica(capacity, self.scheduler.limits))

    def step(self) -> None:
        new = self.trace.until(self.now_ms)
        self.came_ms |= {sequence.request_id: self.now_ms for sequence in new}
        reports = [(name, worker.run()) for name, worker in self.workers.items()]
        plans = self.watch.time(lambda: self.decide(new, reports))
        for pending in plans:
            self.workers[pending.replica.capacity.incarnation].apply(pending.plan)
            for row in pending.rows:
                self.waits_ms.append(self.now_ms - self.came_ms.pop(row.sequence.request_id))
                self.num_cached += row.num_cached
        self.now_ms += STEP_MS

    def decide(self, new: list[Sequence], reports: list[tuple[str, Report | None]]) -> list[PendingPlan]:
        """Have the scheduler do what the batcher's loop asks of it in one turn."""
        for sequence in new:
            self.scheduler.register(sequence)
            self.scheduler.enqueue(sequence)
        for name, report in reports:
            if report is not None:
                self.scheduler.apply_report(name, report)
        self.scheduler.expire(int(self.now_ms))
        plans = list(self.scheduler.plans())
        outcomes = self.scheduler.pop_outcomes()
        assert not (outcomes.to_finish or outcomes.interrupted)
        for sequence in outcomes.finished:
            self.scheduler.forget(sequence)
        return plans


def memory_bytes() -> int:
    """Memory of this process that is in use."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    pool, end_ms = TimedPool(args.seed), args.minutes * 60_000
    memory = 0
    while pool.now_ms < end_ms:
        pool.step()
        if not memory and pool.now_ms >= end_ms / 4:
            memory = memory_bytes() - 8 * len(pool.waits_ms)
    growth = (memory_bytes() - 8 * len(pool.waits_ms)) / memory
    waits = sorted(pool.waits_ms)
    p50, p99 = waits[len(waits) // 2], waits[len(waits) * 99 // 100]
    cpu = pool.watch.spent_s / len(waits) * 1000
    hits = pool.num_cached / max(1, pool.trace.num_sharing * SHARED_TOKENS)
    print(
        f"{len(waits):,} requests in {args.minutes:g} min: {cpu:.2f} s of CPU for 1,000; "
        f"wait p50 {p50:.0f} ms, p99 {p99:.0f} ms; "
        f"{hits:.0%} of what prompts share was computed before; memory × {growth:.2f}"
    )
    return int(cpu > MOST_CPU or p99 > MOST_WAIT_MS or hits < LEAST_HITS or growth > MOST_GROWTH)


if __name__ == "__main__":
    sys.exit(main())
