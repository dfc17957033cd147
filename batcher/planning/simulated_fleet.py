"""Simulated fleet: the real scheduler, simulated workers, and the requests of a trace, in simulated time."""

from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from itertools import pairwise

from batcher.planning.load_trace import TracedRequest
from batcher.planning.simulated_worker import ForecastWorker
from batcher.planning.step_costs import StepCosts
from batcher.scheduling.replica import Replica, WorkerLimits
from batcher.scheduling.scheduler import Scheduler
from batcher.scheduling.sequence import Sequence
from common.messages.plan import WorkerCapacity
from common.messages.records import RECORD, pack_ids
from common.messages.request import Generate, StoppingParams

ENDLESS_MS = 10**12
CONTEXT = 10**9
"""The cache alone bounds a request: a trace says what was answered."""


@dataclass(slots=True)
class SimulatedFleet:
    """A fleet of `num_workers` equal workers.

    Attributes:
        now_ms: simulated time.
        sent_ms: when each request arrived.
        token_ms: when each of its tokens came.
        refused: requests that no worker can ever hold.
    """

    costs: StepCosts
    num_workers: int
    limits: WorkerLimits
    now_ms: float = 0.0
    sent_ms: dict[str, float] = field(default_factory=dict)
    token_ms: dict[str, list[float]] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    workers: dict[str, ForecastWorker] = field(default_factory=dict)
    scheduler: Scheduler = field(init=False)

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.limits, epoch=1)
        for i in range(self.num_workers):
            name = f"w{i}"
            self.workers[name] = ForecastWorker(name, self.costs)
            self.scheduler.workers.add(Replica(self.capacity(name), self.limits))

    def capacity(self, name: str) -> WorkerCapacity:
        costs = self.costs
        sizes = (costs.block_size, costs.num_blocks, costs.max_batch_prefill_tokens, CONTEXT)
        return WorkerCapacity(name, name, "", "", *sizes, standby=True)

    def play(self, trace: Items[TracedRequest]) -> None:
        """Run all requests to their end."""
        arrivals = [(request.arrival_ms, i) for i, request in enumerate(trace)]
        arrivals.reverse()
        while arrivals or self.scheduler.sequences:
            worker = min(
                (it for it in self.workers.values() if it.ends_ms is not None),
                key=lambda it: it.ends_ms or 0.0,
                default=None,
            )
            if arrivals and (worker is None or arrivals[-1][0] <= (worker.ends_ms or 0.0)):
                self.now_ms, number = arrivals.pop()
                self.arrive(f"r{number}", number, trace[number])
            elif worker is not None:
                self.end_step(worker)
            else:
                raise AssertionError(
                    f"{len(self.scheduler.sequences)} requests wait, and no worker has a step"
                )
            self.begin_steps()

    def arrive(self, name: str, number: int, request: TracedRequest) -> None:
        self.sent_ms[name], self.token_ms[name] = self.now_ms, []
        generate = Generate(
            name,
            "d",
            pack_ids([0] * request.prompt_tokens),
            StoppingParams(request.output_tokens, ignore_eos=True),
            gateway="g0",
            tenant=request.tenant,
            class_name=request.class_name,
            ttl_ms=ENDLESS_MS,
        )
        sequence = Sequence(generate, f"{int(self.now_ms) + 1}-{number}", ENDLESS_MS)
        self.scheduler.register(sequence)
        self.scheduler.enqueue(sequence)
        self.decide()

    def end_step(self, worker: ForecastWorker) -> None:
        self.now_ms = worker.ends_ms or self.now_ms
        for name in worker.end_step():
            self.token_ms[name].append(self.now_ms)
        if worker.is_report_due:
            self.report(worker)

    def report(self, worker: ForecastWorker) -> None:
        self.scheduler.apply_report(worker.name, worker.take_report())
        self.decide()

    def begin_steps(self) -> None:
        """Begin a step on each idle worker that has something to do."""
        for worker in self.workers.values():
            if worker.ends_ms is None and not worker.begin_step(self.now_ms) and worker.report.ended:
                self.report(worker)  # a row was stopped while no step ran
                worker.begin_step(self.now_ms)

    def decide(self) -> None:
        """Give workers their plans, and settle what has ended."""
        for pending in self.scheduler.plans():
            self.workers[pending.replica.capacity.incarnation].apply_plan(pending.plan)
        outcomes = self.scheduler.pop_outcomes()
        for sequence in outcomes.finished:
            self.scheduler.forget(sequence)
        for sequence, _ in outcomes.to_finish:
            self.refused.append(sequence.request_id)
            self.scheduler.forget(sequence)
        for sequence in outcomes.interrupted:
            sequence.commit(RECORD.pack(0, 0.0) * len(self.token_ms[sequence.request_id]))
            self.scheduler.resume(sequence)
        if outcomes.interrupted:
            self.decide()

    @property
    def utilisation(self) -> float:
        """Share of the time in which a worker computes, over all workers."""
        busy_ms = sum(worker.busy_ms for worker in self.workers.values())
        return busy_ms / (self.num_workers * self.now_ms) if self.now_ms else 0.0

    @property
    def firsts_ms(self) -> list[float]:
        """Time of each request to its first token, the way through gateway and broker included."""
        return [
            times[0] - self.sent_ms[name] + self.costs.hop_ms
            for name, times in self.token_ms.items()
            if times
        ]

    @property
    def gaps_ms(self) -> list[float]:
        return [later - sooner for times in self.token_ms.values() for sooner, later in pairwise(times)]
