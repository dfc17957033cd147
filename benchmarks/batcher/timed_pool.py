"""A pool of one simulated worker whose steps take time, under a load. It costs no time to speak of, and runs
the scheduler and the engine's choice of prompts as they are.
"""

import random
from dataclasses import dataclass, field
from itertools import pairwise

from batcher.scheduling.replica import WorkerLimits
from benchmarks.serve import Figures
from common.messages.plan import WorkerCapacity
from tests.support.broker_state import make_capacity
from tests.support.fleet.simulated_pool import Pool, request

REPORT_MS = 100.0
TRIP_MS = 4.0
"""From an answer's end to the arrival of the stream's next request."""
APART_MS = 0.1
"""Between two requests that come together."""
CONTEXT = 8192


@dataclass(frozen=True)
class StepCosts:
    """What steps of a worker take: a step, each row that decodes in it, and each prompt token, in ms; and the
    most prompt tokens of one.
    """

    name: str
    step_ms: float
    row_ms: float
    token_ms: float
    prefill_tokens: int


@dataclass(frozen=True)
class Load:
    """Streams that each send a request after the other, or, with `per_s`, requests that arrive at random.

    Attributes:
        spread: prompts and answers are shorter or longer by up to this share.
        per_s: requests a second.
    """

    name: str
    streams: int
    requests: int
    in_tokens: int
    out_tokens: int = 64
    spread: float = 0.0
    per_s: float = 0.0
    shares: bool = False


@dataclass
class TimedPool(Pool):
    """One worker whose steps take time.

    Attributes:
        arrivals: (ms, number) of the requests that are on their way, the soonest first.
        sent_ms, token_ms: when each request was sent, and when each of its tokens came.
        step_tokens: (rows that decode, prompt tokens) of each step.
    """

    costs: StepCosts
    load: Load
    target_ms: float
    clock_ms: float = 0.0
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    sent_ms: dict[str, float] = field(default_factory=dict)
    token_ms: dict[str, list[float]] = field(default_factory=dict)
    step_tokens: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        limits = WorkerLimits(max_batch_size=self.load.streams, inter_token_target_ms=self.target_ms)
        super().__init__(1, 100_000, seed=1, limits=limits, eos_chance=0, shares=self.load.shares)
        self.worker = self.workers["w0"]

    def capacity(self, name: str) -> WorkerCapacity:
        most = self.costs.prefill_tokens
        return make_capacity(
            name,
            self.num_blocks,
            name=name,
            max_batch_prefill_tokens=most,
            context=CONTEXT,
            prefix_caching=self.shares,
            standby=True,
        )

    def length(self, mean: int, draw: random.Random) -> int:
        return max(1, round(mean * draw.uniform(1 - self.load.spread, 1 + self.load.spread)))

    def arrive(self) -> None:
        """Give the scheduler the requests whose time has come; if nothing runs, wait for the next one."""
        if not self.worker.live and self.arrivals:
            self.clock_ms = max(self.clock_ms, self.arrivals[0][0])
        while self.arrivals and self.arrivals[0][0] <= self.clock_ms:
            sent_ms, number = self.arrivals.pop(0)
            name, draw = f"r{number}", random.Random(number)
            self.sent_ms[name], self.token_ms[name] = sent_ms, []
            in_tokens, out_tokens = (
                self.length(mean, draw) for mean in (self.load.in_tokens, self.load.out_tokens)
            )
            self.add(request(name, in_tokens, out_tokens, number, ttl_ms=10**9))
        self.decide()

    def run_step(self) -> None:
        """Run one step in simulated time."""
        worker, costs = self.worker, self.costs
        decoded, prefilled = worker.num_decoded, worker.num_prefilled
        assert worker.run()
        decoded, prefilled = worker.num_decoded - decoded, worker.num_prefilled - prefilled
        ms = costs.step_ms + costs.row_ms * decoded + costs.token_ms * prefilled
        self.clock_ms += ms
        self.step_tokens.append((decoded, prefilled))
        worker.step_times.append((1, int(decoded > 0), prefilled, ms))
        for name, count in worker.committed.items():
            if count > len(self.token_ms[name]):
                self.token_ms[name].append(self.clock_ms)

    def play(self) -> Figures:
        """Runs all requests."""
        load, draw = self.load, random.Random(1)
        num_sent = load.requests if load.per_s else load.streams
        gaps_ms = [draw.expovariate(load.per_s) * 1e3 if load.per_s else APART_MS for _ in range(num_sent)]
        self.arrivals = [(sum(gaps_ms[: i + 1]), i) for i in range(num_sent)]
        while len(self.finished) < load.requests:
            self.arrive()
            self.run_to_report()
            while num_sent < min(load.requests, len(self.finished) + load.streams):
                self.arrivals.append((self.clock_ms + TRIP_MS, num_sent))
                num_sent += 1
        return self.figures()

    def run_to_report(self) -> None:
        """Run steps until the worker reports."""
        report_ms = self.clock_ms + REPORT_MS
        while self.clock_ms < report_ms and self.worker.live:
            self.run_step()
            if self.is_report_due() or (self.arrivals and self.arrivals[0][0] <= self.clock_ms):
                break
        self.worker.release()
        self.scheduler.apply_report("w0", self.worker.take_report())
        self.decide()

    def is_report_due(self) -> bool:
        report = self.worker.report
        return (
            bool(report.ended or report.prefilled)
            or self.worker.rows.step >= self.worker.rows.grant.report_at
        )

    def figures(self) -> Figures:
        gaps = [later - sooner for times in self.token_ms.values() for sooner, later in pairwise(times)]
        firsts = [times[0] - self.sent_ms[name] for name, times in self.token_ms.items()]
        return Figures.of(sum(map(len, self.token_ms.values())) / self.clock_ms * 1e3, firsts, gaps)
