"""Prints how many requests a second the scheduler can take from start to end, at 64 and 1,000 workers:
`python -m benchmarks.batcher.lives [--workers N ...] [--rows 256] [--lives 20000]`.

The scheduler runs alone on one core, with full pools: each request that ends is followed by another. Prompts
have 128 tokens, a fifth of them begin as others do; answers have 128 on average. Workers that cost nothing
report as real ones do: prefills, ends, releases, and the use of half of a grant. Only the scheduler's CPU
time counts, so other load on the machine does not. Exit status 1 below LEAST_LIVES, or if a life costs more
than MOST_GROWTH times as much in the last pool as in the first.

Workers ask for grants in turns, and whole rounds of such turns are measured, since a grant costs more than
other reports. Calls of functions a life are counted in a round of their own: they tell more work from caches
that are colder. The garbage collector works as it does in a batcher.
"""

import argparse
import cProfile
import gc
import heapq
import itertools
import random
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from batcher.scheduling.replica import Replica, WorkerLimits
from batcher.scheduling.scheduler import Scheduler
from batcher.scheduling.sequence import Sequence
from common.messages.plan import Plan, Report
from common.messages.records import pack_ids
from common.messages.request import HASH_BYTES, HASHED_TOKENS, Generate, StoppingParams, root_hash
from common.process.event_loop import MAX_YOUNG_OBJECTS, NEVER
from tests.support.broker_state import make_capacity

NUM_ROWS, NUM_BLOCKS = 256, 6000
PROMPT_TOKENS, MEAN_ANSWER, MAX_ANSWER = 128, 128, 1024
NUM_SYSTEMS, SHARING = 64, 0.2
REPORTS_A_DECISION = 8
GRANT_STEPS = 16
"""Steps from one grant to the next: half of the horizon."""
LEAST_LIVES, MOST_GROWTH = 4000.0, 1.1

T = TypeVar("T")


class Stopwatch:
    """CPU time of the calls that are timed, or with a `profile` the functions that they call."""

    def __init__(self) -> None:
        self.spent_s = 0.0
        self.profile: cProfile.Profile | None = None

    def time(self, call: Callable[[], T]) -> T:
        if self.profile is not None:
            return self.profile.runcall(call)
        began_s = time.process_time()
        result = call()
        self.spent_s += time.process_time() - began_s
        return result


@dataclass
class CostlessWorker:
    """A worker that only knows when each row ends; it has no blocks."""

    draw: random.Random
    ends: list[tuple[int, int, int]] = field(default_factory=list)
    started: list[tuple[int, int]] = field(default_factory=list)
    ended: list[tuple[int, int]] = field(default_factory=list)
    step: int = 0
    until: int = 0
    half: int = 0
    sequence: int = 0

    def apply(self, plan: Plan) -> None:
        self.until = max(self.until, plan.until)
        self.half = (self.step + self.until + 1) // 2
        for start in plan.starts:
            tokens = min(MAX_ANSWER, 1 + int(self.draw.expovariate(1 / MEAN_ANSWER)))
            self.started.append((start.row, PROMPT_TOKENS))
            heapq.heappush(self.ends, (self.step + tokens, start.row, PROMPT_TOKENS + tokens - 1))

    def run(self) -> Report | None:
        """One step, and its report if there is one."""
        if self.step >= self.until:
            return None
        self.step += 1
        self.sequence += 1
        report = Report(self.sequence, 1, 1, self.step, released=self.ended)
        report.prefilled.extend((row, kv_len, self.step) for row, kv_len in self.started)
        self.ended, self.started = [], []
        while self.ends and self.ends[0][0] <= self.step:
            _, row, kv_len = heapq.heappop(self.ends)
            report.ended.append((row, "eos_token", kv_len - PROMPT_TOKENS + 1))
            self.ended.append((row, kv_len))
        is_due = report.prefilled or report.ended or report.released or self.step == self.half
        return report if is_due else None


class FullPool:
    """A scheduler, and as many requests as its workers have rows."""

    def __init__(self, num_workers: int, num_rows: int) -> None:
        self.draw = random.Random(num_workers)
        self.watch = Stopwatch()
        self.scheduler = Scheduler(WorkerLimits(num_rows, 2 * GRANT_STEPS), 1)
        self.workers = {f"w{i}": CostlessWorker(self.draw) for i in range(num_workers)}
        self.systems = [self.draw.randbytes(4 * HASH_BYTES) for _ in range(NUM_SYSTEMS)]
        self.numbers = itertools.count()
        self.prompt = pack_ids(range(PROMPT_TOKENS))
        self.num_ended = 0
        for name in self.workers:
            num_blocks = NUM_BLOCKS * num_rows // NUM_ROWS
            capacity = make_capacity(name, num_blocks, name=name, prefix_caching=True)
            self.scheduler.workers.add(Replica(capacity, self.scheduler.limits))
        self.add(num_workers * num_rows)
        self.decide()

    def add(self, count: int) -> None:
        requests = [self.request() for _ in range(count)]
        self.watch.time(lambda: self.enqueue(requests))

    def request(self) -> Generate:
        shared = self.draw.choice(self.systems) if self.draw.random() < SHARING else b""
        num_own = PROMPT_TOKENS // HASHED_TOKENS - len(shared) // HASH_BYTES
        hashes = root_hash("") + shared + self.draw.randbytes(num_own * HASH_BYTES)
        name = f"r{next(self.numbers)}"
        return Generate(name, "d", self.prompt, StoppingParams(MAX_ANSWER), gateway="g", block_hashes=hashes)

    def enqueue(self, requests: list[Generate]) -> None:
        for request in requests:
            sequence = Sequence(request, f"1000-{request.request_id[1:]}", 10**9)
            self.scheduler.register(sequence)
            self.scheduler.enqueue(sequence)

    def decide(self) -> None:
        for pending in self.watch.time(lambda: list(self.scheduler.plans())):
            self.workers[pending.replica.capacity.incarnation].apply(pending.plan)
        ended = self.watch.time(self.forget)
        self.num_ended += ended
        if ended:
            self.add(ended)

    def forget(self) -> int:
        outcomes = self.scheduler.pop_outcomes()
        assert not (outcomes.to_finish or outcomes.interrupted)
        for sequence in outcomes.finished:
            self.scheduler.forget(sequence)
        return len(outcomes.finished)

    def warm_up(self) -> None:
        """Run until the requests that have waited for others with their beginning have started, and workers
        ask for grants in turns.
        """
        names = list(self.workers)
        for step in range(GRANT_STEPS):
            self.step([name for i, name in enumerate(names) if i % GRANT_STEPS <= step])

    def run(self, num_lives: int) -> int:
        """Run for whole rounds of grants until a number of requests has ended. Return their number."""
        before = self.num_ended
        while self.num_ended < before + num_lives:
            for _ in range(GRANT_STEPS):
                self.step(self.workers)
        return self.num_ended - before

    def step(self, names: Iterable[str]) -> None:
        """Have workers run a step each."""
        num_reports = 0
        for name in names:
            if (report := self.workers[name].run()) is None:
                continue
            self.watch.time(partial(self.scheduler.apply_report, name, report))
            num_reports += 1
            if num_reports % REPORTS_A_DECISION == 0:
                self.decide()
        self.decide()

    def calls_of_life(self) -> float:
        """Run one round. Return how many functions the scheduler calls for a request that ends."""
        profile = self.watch.profile = cProfile.Profile()
        num_ended = self.run(1)
        self.watch.profile = None
        return sum(entry.callcount for entry in profile.getstats()) / num_ended


def measure(num_workers: int, num_rows: int, num_lives: int) -> float:
    """Return the CPU time of a life in seconds."""
    pool = FullPool(num_workers, num_rows)
    pool.warm_up()
    before_s = pool.watch.spent_s
    num_ended = pool.run(num_lives)
    life_s = (pool.watch.spent_s - before_s) / num_ended
    num_calls = pool.calls_of_life()
    began_s = time.process_time()
    for _ in range(1000):
        list(pool.scheduler.plans())
    idle_s = (time.process_time() - began_s) / 1000
    rows = sum(replica.num_running for replica in pool.scheduler.replicas.values())
    print(
        f"{num_workers:5} workers, {rows:6} rows: {1 / life_s:7,.0f} lives/s, {life_s * 1e6:5.0f} µs and "
        f"{num_calls:,.0f} calls each; "
        f"a decision about nothing {idle_s * 1e6:.1f} µs",
        flush=True,
    )
    return life_s


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, nargs="+", default=[64, 1000])
    parser.add_argument("--rows", type=int, default=NUM_ROWS)
    parser.add_argument("--lives", type=int, default=20_000)
    args = parser.parse_args()
    gc.set_threshold(MAX_YOUNG_OBJECTS, NEVER, NEVER)
    lives_s = [measure(num_workers, args.rows, args.lives) for num_workers in args.workers]
    growth = lives_s[-1] / lives_s[0]
    print(f"a life costs {growth:.2f} times as much in the last pool as in the first")
    return int(max(lives_s) > 1 / LEAST_LIVES or growth > MOST_GROWTH)


if __name__ == "__main__":
    sys.exit(main())
