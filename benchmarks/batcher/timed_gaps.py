"""A pool of one simulated worker with bulk work in its queue, and callers that come at random: what
`benchmarks.batcher.jobs --engine simulated` measures, in simulated time and so without noise.
"""

import random
from dataclasses import dataclass, field, replace

from batcher.scheduling.sequence import Sequence
from benchmarks.batcher.timed_pool import REPORT_MS, TimedPool
from tests.support.fleet.simulated_pool import sharing_request

WAITING = 64
"""Bulk requests that wait, whenever there is bulk work."""
LEAST_MS = 0.01


@dataclass
class GapsPool(TimedPool):
    """One worker; `load.per_s` callers a second, of the shape of `load`, and bulk work of the same shape.

    Attributes:
        seconds: how long it runs, in simulated time.
        seed: of the callers' moments.
        with_callers, with_bulk: who asks.
    """

    seconds: float = 60.0
    fill_ms: float = 0.0
    seed: int = 1
    with_callers: bool = True
    with_bulk: bool = True
    num_bulk: int = 0
    at_fill: int = 0
    firsts_ms: list[float] = field(default_factory=list)

    def sequence(self, name: str, class_name: str, number: int) -> Sequence:
        draw = random.Random(number)
        in_tokens, out_tokens = (
            self.length(mean, draw) for mean in (self.load.in_tokens, self.load.out_tokens)
        )
        prompt = list(range(number * 4096, number * 4096 + in_tokens))
        made = sharing_request(name, prompt, out_tokens, number)
        asked = replace(made.request, class_name=class_name, gateway="g")
        return Sequence(asked, made.entry_id, made.deadline_ms)

    def arrive(self) -> None:
        """Give the scheduler callers whose time has come, and bulk work as long as too little waits."""
        if not self.with_bulk and not self.worker.rows and self.arrivals:
            self.clock_ms = max(self.clock_ms, self.arrivals[0][0])
        while self.arrivals and self.arrivals[0][0] <= self.clock_ms:
            sent_ms, number = self.arrivals.pop(0)
            self.sent_ms[f"c{number}"] = sent_ms
            self.token_ms[f"c{number}"] = []
            self.add(self.sequence(f"c{number}", "interactive", 10**5 + number))
        while self.with_bulk and self.scheduler.num_live() < self.load.streams + WAITING:
            self.num_bulk += 1
            self.token_ms[f"b{self.num_bulk}"] = []
            self.add(self.sequence(f"b{self.num_bulk}", "batch", self.num_bulk))
        self.decide()

    def measure(self) -> tuple[list[float], float]:
        """Runs → the sorted times to first token of callers, and tokens/s."""
        self.committed = self.worker.committed
        draw, at_ms = random.Random(self.seed), self.fill_ms
        while (
            self.with_callers
            and (at_ms := at_ms + draw.expovariate(self.load.per_s) * 1e3) < self.seconds * 1e3
        ):
            self.arrivals.append((at_ms, len(self.arrivals)))
        while self.clock_ms < self.seconds * 1e3 and (self.with_bulk or self.arrivals or self.worker.rows):
            if not self.at_fill and self.clock_ms >= self.fill_ms:
                self.at_fill = sum(map(len, self.token_ms.values()))
            self.arrive()
            report_ms = self.clock_ms + REPORT_MS
            while self.clock_ms < report_ms and self.worker.rows:
                self.run_step()
                if self.is_report_due() or (self.arrivals and self.arrivals[0][0] <= self.clock_ms):
                    break
            self.worker.release()
            self.scheduler.apply_report("w0", self.worker.take_report())
            self.decide()
            self.clock_ms += LEAST_MS
        firsts = [self.token_ms[name][0] - sent for name, sent in self.sent_ms.items() if self.token_ms[name]]
        tokens = sum(map(len, self.token_ms.values()))
        return sorted(firsts), (tokens - self.at_fill) / (self.clock_ms - self.fill_ms) * 1e3
