"""Prints how well a batch fills what callers leave, in simulated time and so without noise:
`python -m benchmarks.batcher.timed_gaps`.

Callers of the class `interactive` come at random; bulk work of the same shape waits in a queue that is never
empty. The scheduler and the engine's choice of prompts run as they are, with a simulated worker for each kind
of machine. Exit status 1 if one of the first
machines (`MET`) misses a ratio.
"""

import random
import statistics
import sys
from dataclasses import dataclass, replace

from batcher.scheduling.sequence import Sequence
from benchmarks.batcher.timed_pool import Load, StepCosts, TimedPool
from benchmarks.serve import percentile
from tests.support.fleet.simulated_pool import sharing_request

MOST_LATER, LEAST_SHARE = 1.25, 0.95
WAITING = 64
"""Bulk requests that wait, whenever there is bulk work."""
FIRST_CALLER = 10**5
LONGEST = 4096
"""More tokens than a prompt has: prompts of different numbers share none."""
MET = (
    (StepCosts("16 rows, as scripted", 8.0, 0.0, 0.04, 1024), Load("", 16, 0, 512, 64, 0.5, 2.5)),
    (StepCosts("16 rows, short prompts", 8.0, 0.0, 0.04, 1024), Load("", 16, 0, 128, 64, 0.5, 2.5)),
    (StepCosts("one GPU, 8B, 64 rows", 5.0, 0.025, 0.015, 8192), Load("", 64, 0, 512, 128, 0.5, 10)),
)
CASES = (
    *MET,
    (StepCosts("one GPU, 8B, 256 rows", 5.0, 0.025, 0.015, 8192), Load("", 256, 0, 512, 128, 0.5, 10)),
    (StepCosts("two cores, AVX512", 7.5, 0.55, 0.3, 2048), Load("", 32, 0, 128, 64, 0.5, 2)),
    (StepCosts("two cores, AMX", 6.0, 0.25, 0.06, 2048), Load("", 32, 0, 128, 64, 0.5, 3)),
)


@dataclass
class GapsPool(TimedPool):
    """One worker; `load.per_s` callers a second, and bulk work, both of the shape of `load`.

    Attributes:
        fill_s: how long bulk work has to fill the worker before callers come, and anything is counted.
        seconds: how long it is measured then.
        num_bulk: bulk requests so far.
    """

    fill_s: float = 20.0
    seconds: float = 60.0
    with_callers: bool = True
    with_bulk: bool = True
    num_bulk: int = 0

    def sequence(self, name: str, class_name: str, number: int) -> Sequence:
        draw = random.Random(number)
        in_tokens, out_tokens = (
            self.length(mean, draw) for mean in (self.load.in_tokens, self.load.out_tokens)
        )
        prompt = list(range(number * LONGEST, number * LONGEST + in_tokens))
        return sharing_request(name, prompt, out_tokens, number, class_name=class_name, gateway="g")

    def arrive(self) -> None:
        """Give the scheduler callers whose time has come, and bulk work as long as too little waits."""
        if not (self.with_bulk or self.worker.live) and self.arrivals:
            self.clock_ms = max(self.clock_ms, self.arrivals[0][0])
        while self.arrivals and self.arrivals[0][0] <= self.clock_ms:
            sent_ms, number = self.arrivals.pop(0)
            self.sent_ms[f"c{number}"], self.token_ms[f"c{number}"] = sent_ms, []
            self.add(self.sequence(f"c{number}", "interactive", FIRST_CALLER + number))
        while self.with_bulk and len(self.scheduler.sequences) < self.load.streams + WAITING:
            self.num_bulk += 1
            self.token_ms[f"b{self.num_bulk}"] = []
            self.add(self.sequence(f"b{self.num_bulk}", "batch", self.num_bulk))
        self.decide()

    def draw_arrivals(self, until_ms: float) -> None:
        draw, at_ms = random.Random(1), self.fill_s * 1e3
        while (at_ms := at_ms + draw.expovariate(self.load.per_s) * 1e3) < until_ms:
            self.arrivals.append((at_ms, len(self.arrivals)))

    def run_until(self, end_ms: float) -> None:
        while self.clock_ms < end_ms and (self.with_bulk or self.arrivals or self.worker.live):
            self.arrive()
            self.run_to_report()

    def measure(self) -> tuple[list[float], float]:
        """Runs → the times to first token of callers in ms, and tokens/s."""
        self.committed = self.worker.committed
        fill_ms, end_ms = self.fill_s * 1e3, (self.fill_s + self.seconds) * 1e3
        if self.with_callers:
            self.draw_arrivals(end_ms)
        self.run_until(fill_ms)
        began_ms, before = self.clock_ms, sum(map(len, self.token_ms.values()))
        self.run_until(end_ms)
        tokens = sum(map(len, self.token_ms.values())) - before
        firsts = [self.token_ms[name][0] - sent for name, sent in self.sent_ms.items() if self.token_ms[name]]
        return firsts, tokens / (self.clock_ms - began_ms) * 1e3


def play(costs: StepCosts, load: Load) -> bool:
    """Prints one machine's ratios → whether both are met."""
    load = replace(load, shares=True)
    alone, _ = GapsPool(costs, load, 0.0, with_bulk=False).measure()
    _, bulk_per_s = GapsPool(costs, load, 0.0, with_callers=False).measure()
    both, both_per_s = GapsPool(costs, load, 0.0).measure()
    later, share = percentile(both, 0.99) / percentile(alone, 0.99), both_per_s / bulk_per_s
    print(
        f"{costs.name:24} {len(alone):5} callers, first token p50 {statistics.median(alone):4.0f} → "
        f"{statistics.median(both):4.0f} ms, p99 {percentile(alone, 0.99):4.0f} → "
        f"{percentile(both, 0.99):4.0f} ms ({later:.2f} times); {bulk_per_s:6.0f} tokens/s → {share:.3f}",
        flush=True,
    )
    return later <= MOST_LATER and share >= LEAST_SHARE


def main() -> int:
    good = [play(costs, load) for costs, load in CASES]
    return int(not all(good[: len(MET)]))


if __name__ == "__main__":
    sys.exit(main())
