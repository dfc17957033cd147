"""Simulated worker: obeys the scheduler's plans in simulated time, and reports as a worker does."""

from dataclasses import dataclass, field
from itertools import islice

from batcher.planning.step_costs import StepCosts
from common.messages.plan import NewRow, Plan, Report
from common.messages.request import class_index
from common.prefill_budget import PrefillBudget, StepBudget


@dataclass(slots=True, eq=False)
class ForecastRow:
    """A row. `kv_len` are its tokens in the cache, `target` those that its prefill computes."""

    start: NewRow
    num_blocks: int
    target: int
    num_tokens: int
    kv_len: int = 0

    @property
    def is_prefilled(self) -> bool:
        return self.kv_len >= self.target

    @property
    def request_id(self) -> str:
        return self.start.request.request_id

    @property
    def urgency(self) -> int:
        return class_index(self.start.request.class_name)

    @property
    def place_in_line(self) -> tuple[int, int]:
        """The engine computes prompts by class, then the one with the fewest tokens left."""
        return self.urgency, self.target - self.kv_len


@dataclass(slots=True, eq=False)
class ForecastWorker:
    """A worker.

    Attributes:
        ends_ms: when the step that runs ends; None while it is idle.
        sampled: the requests that get a token at the end of that step.
        busy_ms: time of all its steps.
    """

    name: str
    costs: StepCosts
    rows: dict[int, ForecastRow] = field(default_factory=dict)
    leaving: list[tuple[int, ForecastRow]] = field(default_factory=list)
    plan: Plan = field(default_factory=lambda: Plan(0, 1, 0, 0))
    until: int = 0
    step: int = 0
    budget: PrefillBudget = field(default_factory=PrefillBudget)
    ends_ms: float | None = None
    sampled: list[str] = field(default_factory=list)
    busy_ms: float = 0.0
    sequence: int = 1
    report: Report = field(init=False)

    def __post_init__(self) -> None:
        self.report = Report(self.sequence, 1, self.plan.number, self.step)

    def apply_plan(self, plan: Plan) -> None:
        self.plan, self.until = plan, max(self.until, plan.until)
        for number, why in plan.stops:
            if number in self.rows:
                self.end(number, why)
        for number, blocks in plan.blocks:
            if number in self.rows:
                self.rows[number].num_blocks += len(blocks) // 4
        for start in plan.starts:
            target = start.request.num_prompt + start.base
            self.rows[start.row] = ForecastRow(start, len(start.blocks) // 4, target, start.base)

    def end(self, number: int, why: str) -> None:
        row = self.rows.pop(number)
        self.report.ended.append((number, why, row.num_tokens))
        self.leaving.append((number, row))

    def room(self, row: ForecastRow) -> int:
        """Return the number of free slots in a row's blocks."""
        return row.num_blocks * self.costs.block_size - row.kv_len

    def begin_step(self, now_ms: float) -> bool:
        """Begin a step, if one is granted and a row can take part."""
        if self.step >= self.until:
            return False
        in_step = list(islice(self.rows.items(), self.plan.max_rows or None))
        decoding = [item for item in in_step if item[1].is_prefilled and self.room(item[1]) > 0]
        prompts = [item for item in in_step if not item[1].is_prefilled and self.room(item[1]) > 0]
        prompts.sort(key=lambda item: item[1].place_in_line)
        budget = self.step_budget([row for _, row in decoding], [row for _, row in prompts])
        decoding = [item for item in decoding if budget.decodes(item[1].urgency)]
        chunks = self.choose_chunks(budget, prompts)
        if not (decoding or chunks):
            return False
        self.step += 1
        for _, row, count in chunks:
            row.kv_len += count
        finished = [(number, row) for number, row, _ in chunks if row.is_prefilled]
        self.report.prefilled.extend((number, row.kv_len, self.step) for number, row in finished)
        for _, row in decoding:
            row.kv_len += 1
        num_prompt_tokens = sum(count for *_, count in chunks)
        self.time_step(now_ms, len(decoding), len(finished), num_prompt_tokens)
        self.sample([*decoding, *finished])
        return True

    def step_budget(self, decoding: list[ForecastRow], prompts: list[ForecastRow]) -> StepBudget:
        """Return what the next step may have."""
        left = [(row.urgency, min(row.target - row.kv_len, self.room(row))) for row in prompts]
        return self.budget.plan(self.plan, [row.urgency for row in decoding], left)

    def choose_chunks(
        self, budget: StepBudget, prompts: list[tuple[int, ForecastRow]]
    ) -> list[tuple[int, ForecastRow, int]]:
        """Return (number, row, tokens) of the prompts that the step computes."""
        chunks = []
        for number, row in prompts:
            count = min(row.target - row.kv_len, budget.left(row.urgency), self.room(row))
            if count > 0:
                chunks.append((number, row, count))
                budget.spend(row.urgency, count)
        return chunks

    def time_step(self, now_ms: float, num_decoding: int, num_finished: int, num_prompt_tokens: int) -> None:
        ms = self.costs.ms(num_decoding + num_finished, num_prompt_tokens)
        self.ends_ms = now_ms + ms
        self.busy_ms += ms
        self.report.step_times.append((1, int(num_decoding > 0), num_prompt_tokens, ms))

    def sample(self, rows: list[tuple[int, ForecastRow]]) -> None:
        self.sampled = [row.request_id for _, row in rows]
        for number, row in rows:
            row.num_tokens += 1
            if row.num_tokens >= row.start.request.stopping.max_new_tokens:
                self.end(number, "length")

    def end_step(self) -> list[str]:
        """End the step that runs. Returns the requests that got a token."""
        self.ends_ms = None
        return self.sampled

    @property
    def is_report_due(self) -> bool:
        return bool(self.report.ended or self.report.prefilled) or self.step >= self.plan.report_at

    def take_report(self) -> Report:
        """Return the report of all since the last one. Rows that have ended are released with it."""
        self.report.released.extend((number, row.kv_len) for number, row in self.leaving)
        self.leaving.clear()
        found = self.report
        self.sequence += 1
        self.report = Report(self.sequence, 1, self.plan.number, self.step)
        return Report(
            found.sequence,
            1,
            self.plan.number,
            self.step,
            found.prefilled,
            found.ended,
            found.released,
            step_times=found.step_times,
        )
