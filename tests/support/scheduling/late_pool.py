"""LatePool: a scheduler and a simulated worker, of which plans and reports come some steps late."""

from collections import Counter, deque
from itertools import count

from batcher.scheduling.replica import WorkerLimits
from common.messages.plan import Plan, Report
from tests.support.fleet.simulated_pool import Pool, request

STEP_MS = 2.0


class LatePool:
    """Three times as many requests as places, so that others wait. A tick is the time of a step.

    Attributes:
        late: ticks that a plan or a report takes.
        taken: places that rows had, by tick.
        granted: steps that were granted and not made when a plan came, of each plan.
    """

    def __init__(
        self,
        late: int,
        limits: WorkerLimits,
        num_blocks: int = 2000,
        eos_chance: float = 1 / 128,
        standby: bool = True,
    ) -> None:
        self.late = late
        self.pool = Pool(1, num_blocks, 1, limits, eos_chance, shares=False, standby=standby)
        self.worker = self.pool.workers["w0"]
        self.replica = self.pool.scheduler.replicas["w0"]
        self.numbers = count()
        self.plans: deque[tuple[int, Plan]] = deque()
        self.reports: deque[tuple[int, Report]] = deque()
        self.taken: list[int] = []
        self.granted: list[int] = []
        self.due_tick = -1
        self.reported_step = 0
        self.num_steps = 0

    @property
    def tick(self) -> int:
        return len(self.taken)

    @property
    def num_places(self) -> int:
        return self.pool.scheduler.limits.max_batch_size

    def run(self, ticks: int) -> Counter[int]:
        """Run some ticks. Returns in how many of them each number of places was taken."""
        before = self.tick
        for _ in range(ticks):
            self.decide()
            self.deliver_plans()
            ran = self.worker.run()
            self.worker.release()
            self.num_steps += ran
            self.taken.append(min(self.num_places, len(self.worker.rows)) * ran)
            self.send_report()
            while self.reports and self.reports[0][0] <= self.tick:
                self.pool.scheduler.apply_report("w0", self.reports.popleft()[1])
        return Counter(self.taken[before:])

    def decide(self) -> None:
        scheduler = self.pool.scheduler
        while len(scheduler.sequences) < 3 * self.num_places:
            number = next(self.numbers)
            self.pool.add(request(f"r{number}", 8, 1000, number))
        self.plans += [(self.tick + self.late, pending.plan) for pending in scheduler.plans()]
        outcomes = scheduler.pop_outcomes()
        for sequence in outcomes.finished:
            scheduler.forget(sequence)
        for sequence in outcomes.interrupted:
            self.pool.resume(sequence)

    def deliver_plans(self) -> None:
        while self.plans and self.plans[0][0] <= self.tick:
            plan = self.plans.popleft()[1]
            if self.due_tick >= 0 and plan.report_at > self.worker.report_at:
                self.worker.report.round_trips.append((self.tick - self.due_tick) * STEP_MS)
                self.due_tick = -1
            self.worker.apply_plan(plan)
            self.granted.append(self.worker.until - self.worker.step)

    def send_report(self) -> None:
        worker = self.worker
        is_due = worker.step >= worker.report_at > self.reported_step
        if is_due and self.due_tick < 0:
            self.due_tick = self.tick
        if is_due or worker.report.ended or worker.report.released or worker.report.prefilled:
            worker.report.step_times.append((self.num_steps, self.num_steps, 0, self.num_steps * STEP_MS))
            self.reported_step, self.num_steps = worker.step, 0
            self.reports.append((self.tick + self.late, worker.take_report()))
