"""Prints how many requests a second the scheduler can take from start to end, at 64 and 1,000 workers:
`python -m benchmarks.batcher.lives [--workers N ...] [--rows 256] [--lives 20000]`.

The scheduler runs alone on one core, with full pools: each request that ends is followed by another. Prompts
have 128 tokens, a fifth of them begin as others do; answers have 128 on average. The simulated workers of the
tests report as real ones do: prefills, ends, releases, and the use of half of a grant. Only the scheduler's
CPU time counts, so neither they nor other load on the machine do. Exit status 1 below LEAST_LIVES, or if a
life costs more than MOST_GROWTH times as much in the last pool as in the first.

Workers ask for grants in turns, and whole rounds of such turns are measured, since a grant costs more than
other reports. Calls of functions a life are counted in a round of their own: they tell more work from caches
that are colder. The garbage collector works as it does in a batcher.
"""

import argparse
import cProfile
import gc
import itertools
import sys
import time
from collections.abc import Callable, Iterable
from functools import wraps
from typing import ParamSpec, TypeVar

from batcher.scheduling.replica import WorkerLimits
from batcher.scheduling.sequence import Sequence
from common.messages.records import pack_ids
from common.messages.request import HASH_BYTES, HASHED_TOKENS, Generate, StoppingParams, root_hash
from common.process.event_loop import MAX_YOUNG_OBJECTS, NEVER
from tests.support.fleet.simulated_pool import Pool

NUM_ROWS, NUM_BLOCKS = 256, 6000
PROMPT_TOKENS, MEAN_ANSWER, MAX_ANSWER = 128, 128, 1024
NUM_SYSTEMS, SHARING = 64, 0.2
REPORTS_A_DECISION = 8
GRANT_STEPS = 16
"""Steps from one grant to the next: half of the horizon."""
LEAST_LIVES, MOST_GROWTH = 4000.0, 1.1

P = ParamSpec("P")
T = TypeVar("T")


class Stopwatch:
    """CPU time of the calls that are timed, or with a `profile` the functions that they call."""

    def __init__(self) -> None:
        self.spent_s = 0.0
        self.profile: cProfile.Profile | None = None

    def timed(self, call: Callable[P, T]) -> Callable[P, T]:
        @wraps(call)
        def run(*arguments: P.args, **options: P.kwargs) -> T:
            if self.profile is not None:
                return self.profile.runcall(call, *arguments, **options)
            began_s = time.process_time()
            result = call(*arguments, **options)
            self.spent_s += time.process_time() - began_s
            return result

        return run


class FullPool(Pool):
    """A pool with as many requests as its workers have rows."""

    def __init__(self, num_workers: int, num_rows: int) -> None:
        limits, num_blocks = WorkerLimits(num_rows, 2 * GRANT_STEPS), NUM_BLOCKS * num_rows // NUM_ROWS
        super().__init__(num_workers, num_blocks, num_workers, limits, eos_chance=1 / MEAN_ANSWER)
        self.watch = Stopwatch()
        self.systems = [self.random.randbytes(4 * HASH_BYTES) for _ in range(NUM_SYSTEMS)]
        self.numbers = itertools.count()
        self.prompt = pack_ids(range(PROMPT_TOKENS))
        plans = self.scheduler.plans
        vars(self.scheduler)["plans"] = lambda: list(plans())
        for name in ("plans", "pop_outcomes", "forget", "register", "enqueue", "apply_report"):
            vars(self.scheduler)[name] = self.watch.timed(getattr(self.scheduler, name))
        self.add(*(self.request() for _ in range(num_workers * num_rows)))
        self.decide()

    def request(self) -> Sequence:
        shared = self.random.choice(self.systems) if self.random.random() < SHARING else b""
        num_own = PROMPT_TOKENS // HASHED_TOKENS - len(shared) // HASH_BYTES
        hashes = root_hash("") + shared + self.random.randbytes(num_own * HASH_BYTES)
        number, stopping = next(self.numbers), StoppingParams(MAX_ANSWER)
        generate = Generate(f"r{number}", "d", self.prompt, stopping, gateway="g", block_hashes=hashes)
        return Sequence(generate, f"1000-{number}", 10**9)

    def decide(self) -> None:
        before = len(self.finished)
        super().decide()
        self.add(*(self.request() for _ in range(len(self.finished) - before)))

    def warm_up(self) -> None:
        """Run until the requests that have waited for others with their beginning have started, and workers
        ask for grants in turns.
        """
        names = list(self.workers)
        for step in range(GRANT_STEPS):
            self.step([name for i, name in enumerate(names) if i % GRANT_STEPS <= step])

    def run_lives(self, num_lives: int) -> int:
        """Run for whole rounds of grants until a number of requests has ended. Return their number."""
        before = len(self.finished)
        while len(self.finished) < before + num_lives:
            for _ in range(GRANT_STEPS):
                self.step(self.workers)
        return len(self.finished) - before

    def step(self, names: Iterable[str]) -> None:
        """Have workers run a step each."""
        num_reports = 0
        for name in names:
            worker = self.workers[name]
            has_run = worker.run()
            worker.release()
            report = worker.report
            is_due = has_run and worker.step == worker.report_at
            if is_due or report.prefilled or report.ended or report.released:
                self.scheduler.apply_report(name, worker.take_report())
                num_reports += 1
                if num_reports % REPORTS_A_DECISION == 0:
                    self.decide()
        self.decide()

    def calls_of_life(self) -> float:
        """Run one round. Return how many functions the scheduler calls for a request that ends."""
        profile = self.watch.profile = cProfile.Profile()
        num_ended = self.run_lives(1)
        self.watch.profile = None
        return sum(entry.callcount for entry in profile.getstats()) / num_ended


def measure(num_workers: int, num_rows: int, num_lives: int) -> float:
    """Return the CPU time of a life in seconds."""
    pool = FullPool(num_workers, num_rows)
    pool.warm_up()
    before_s = pool.watch.spent_s
    num_ended = pool.run_lives(num_lives)
    life_s = (pool.watch.spent_s - before_s) / num_ended
    num_calls = pool.calls_of_life()
    began_s = time.process_time()
    for _ in range(1000):
        pool.scheduler.plans()
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
