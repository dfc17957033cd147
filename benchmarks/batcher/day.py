"""Prints how long each tenant waits on a simulated day: `python -m benchmarks.batcher.day [--minutes 4]`.

The scheduler runs alone, with four simulated workers of 16 rows; a step takes 8 ms and 0.04 ms for each
prompt token. Callers come at random, in bursts, with heavy tails of prompts and answers: two tenants of the
class `interactive`, two of `standard`, one tenant that floods `standard` for a third of the time, and a large
batch of jobs. Every minute a worker dies and another comes. The same trace is served by the real queue, and
by one that is first come, first served. Exit status 1 if the p99 of a tenant (except the flooding one and the
batch) is above LIMIT_MS, or if a request does not end. The same seed prints the same figures.
"""

import argparse
import random
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from unittest.mock import patch

from batcher.scheduling.replica import WorkerLimits
from batcher.scheduling.sequence import Sequence
from benchmarks.batcher.prefix import STEP_MS, TICK_MS, TOKEN_MS
from common.messages.plan import WorkerCapacity
from tests.support.broker_state import make_capacity
from tests.support.fleet.simulated_pool import Pool, request

NUM_WORKERS, NUM_ROWS, NUM_BLOCKS, STEP_TOKENS = 4, 16, 2000, 512
DEATH_MS = 60_000.0
MAX_PROMPT, MAX_ANSWER = 4000, 600
LIMIT_MS = 1000.0
"""p99 of the time to first token."""
HEAVY = ("flood", "jobs")
"""Tenants that ask for more than the pool can serve."""


@dataclass(frozen=True, slots=True)
class Caller:
    """One tenant in one class.

    Attributes:
        rate: requests a second, on average.
        begin, end: share of the day in which it comes.
        burst: requests that come together.
        prompt, answer: median tokens.
    """

    tenant: str
    priority: str
    rate: float
    begin: float = 0.0
    end: float = 1.0
    burst: int = 1
    prompt: int = 200
    answer: int = 60


CALLERS = (
    Caller("ann", "interactive", 1.0),
    Caller("bob", "interactive", 1.0, burst=8),
    Caller("carl", "standard", 1.5),
    Caller("dora", "standard", 1.0, burst=4),
    Caller("flood", "standard", 25.0, begin=0.3, end=0.6, burst=50),
    Caller("jobs", "batch", 200.0, begin=0.1, end=0.12, burst=200),
)


class TimedPool(Pool):
    """A pool of workers whose steps take time, and that die.

    Attributes:
        first_ms: when a request had its first token.
    """

    def __init__(self, seed: int) -> None:
        self.clocks_ms: dict[str, float] = {}
        self.now_ms = 0.0
        self.first_ms: dict[str, float] = {}
        super().__init__(NUM_WORKERS, NUM_BLOCKS, seed, WorkerLimits(NUM_ROWS), eos_chance=0, shares=False)

    def add_worker(self) -> str:
        name = super().add_worker()
        self.clocks_ms[name] = self.now_ms
        return name

    def capacity(self, name: str) -> WorkerCapacity:
        return make_capacity(name, NUM_BLOCKS, name=name, max_batch_prefill_tokens=STEP_TOKENS)

    def run_until(self, now_ms: float) -> None:
        """Run the steps that begin before this time, then report."""
        self.now_ms = now_ms
        self.decide()
        for name, worker in self.workers.items():
            while self.clocks_ms[name] < now_ms:
                before = worker.num_prefilled
                if not worker.run():
                    self.clocks_ms[name] = now_ms
                    break
                self.clocks_ms[name] += STEP_MS + TOKEN_MS * (worker.num_prefilled - before)
                if worker.num_prefilled > before:
                    new = worker.committed.keys() - self.first_ms.keys()
                    self.first_ms |= dict.fromkeys(new, self.clocks_ms[name])
            worker.release()
            self.committed |= worker.committed
            self.scheduler.apply_report(name, worker.take_report())


def length(draw: random.Random, median: int, most: int) -> int:
    """A length with a heavy tail."""
    return max(1, min(most, round(median * draw.lognormvariate(0, 1))))


def arrivals(draw: random.Random, day_ms: float) -> Iterator[tuple[float, Caller]]:
    for caller in CALLERS:
        at_ms = caller.begin * day_ms
        while (at_ms := at_ms + draw.expovariate(caller.rate / caller.burst) * 1000) < caller.end * day_ms:
            for _ in range(caller.burst):
                yield at_ms, caller


def make_trace(seed: int, day_ms: float) -> list[tuple[float, Caller, Sequence]]:
    draw = random.Random(seed)
    trace = []
    for number, (at_ms, caller) in enumerate(sorted(arrivals(draw, day_ms), key=lambda item: item[0])):
        sizes = length(draw, caller.prompt, MAX_PROMPT), length(draw, caller.answer, MAX_ANSWER)
        sequence = request(f"r{number}", *sizes, number, ttl_ms=10**12)
        asked = replace(sequence.request, class_name=caller.priority, tenant=caller.tenant)
        trace.append((at_ms, caller, Sequence(asked, sequence.entry_id, sequence.deadline_ms)))
    return trace


def play(seed: int, day_ms: float, in_order: bool) -> dict[tuple[str, str], list[float]]:
    """Return the times to first token, in ms, by class and tenant.

    Args:
        in_order: first come, first served.
    """
    pool, trace = TimedPool(seed), make_trace(seed, day_ms)
    due, next_death_ms, now_ms = 0, DEATH_MS, 0.0
    while due < len(trace) or pool.scheduler.sequences:
        now_ms += TICK_MS
        while due < len(trace) and trace[due][0] <= now_ms:
            sequence = trace[due][2]
            if in_order:
                one_line = replace(sequence.request, class_name="", tenant="")
                sequence = Sequence(one_line, sequence.entry_id, sequence.deadline_ms)
            pool.add(sequence)
            due += 1
        if now_ms > next_death_ms:
            next_death_ms += DEATH_MS
            pool.kill(pool.random.choice(sorted(pool.workers)))
            pool.add_worker()
        pool.run_until(now_ms)
    assert sorted(pool.finished) == sorted(sequence.request_id for _, _, sequence in trace)
    waits: dict[tuple[str, str], list[float]] = defaultdict(list)
    for at_ms, caller, sequence in trace:
        waits[caller.priority, caller.tenant].append(pool.first_ms[sequence.request_id] - at_ms)
    return waits


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=4)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    day_ms = args.minutes * 60_000
    fair = play(args.seed, day_ms, in_order=False)
    with patch("batcher.scheduling.request_queue.MAX_PASSED", 0):
        in_order = play(args.seed, day_ms, in_order=True)
    print("| class | tenant | requests | p50 | p99 | in order: p50 | p99 |")
    print("|---|---|---|---|---|---|---|")
    missed = []
    for key in [(caller.priority, caller.tenant) for caller in CALLERS]:
        figures = [percentile(of[key], share) for of in (fair, in_order) for share in (0.5, 0.99)]
        shown = " | ".join(f"{figure / 1000:.2f} s" for figure in figures)
        print(f"| {key[0]} | {key[1]} | {len(fair[key])} | {shown} |")
        if figures[1] > LIMIT_MS and key[1] not in HEAVY:
            missed.append(key)
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
