"""A scheduler and simulated workers that obey its plans, without Redis: the engine's own rows, with reports.
A worker complains when a plan breaks the rules of blocks. In a
LatePool plans and reports come some steps late.
"""

import random
from collections import Counter, deque
from dataclasses import dataclass, field, replace
from itertools import count
from zlib import crc32

from batcher.scheduling.plan_builder import PendingPlan
from batcher.scheduling.replica import Replica, WorkerLimits
from batcher.scheduling.scheduler import Scheduler
from batcher.scheduling.sequence import Sequence
from common.messages.events import INTERRUPTED
from common.messages.plan import HeldRow, NewRow, Plan, Report, WorkerCapacity
from common.messages.records import RECORD, pack_ids, unpack_ids
from common.messages.request import (
    HASHED_TOKENS,
    Generate,
    StoppingParams,
    block_names,
    extend_hashes,
    root_hash,
)
from gpu_worker.engine.batch.adapters import Adapter
from gpu_worker.engine.batch.beams import BeamGroup
from gpu_worker.engine.batch.row import NEVER, Row, RowSlice
from gpu_worker.engine.batch.rows import Rows
from gpu_worker.engine.batch.step_result import Candidate, StepSamples
from gpu_worker.protocol import StepResult
from tests.support.speculation.knowing_proposer import KnowingProposer

FIRST_ID, EOS = 1_000_000, 2
ANSWER = range(FIRST_ID, FIRST_ID + 2**16)
"""What every request generates, up to its end."""


def generated_id(index: int) -> int:
    """The token that every request generates at this index."""
    return ANSWER[index]


def ends_at(request_id: str, num_tokens: int, chance: float) -> bool:
    """Whether a request's token at this index ends it, on every worker and in every attempt."""
    return crc32(f"{request_id} {num_tokens}".encode()) < chance * 2**32


@dataclass(eq=False)
class SimulatedRow:
    """A row as the worker sees it: `row` is the engine's."""

    start: NewRow
    row: Row
    told_as: tuple[int, int] = (0, 0)
    is_ahead: bool = False
    ids: bytes = b""
    hashes: bytes = b""

    def __post_init__(self) -> None:
        self.ids = self.start.request.prompt_ids
        self.hashes = self.start.request.block_hashes

    @property
    def kv_len(self) -> int:
        return self.row.kv_len

    @property
    def num_tokens(self) -> int:
        return self.row.collected_index

    @property
    def is_prefilled(self) -> bool:
        return self.told_as != (0, 0)

    def names(self, block_size: int) -> list[bytes]:
        """Names of its full blocks; none if it shares no blocks."""
        if self.start.request.block_hashes:
            known = len(self.ids) // 4 - self.start.request.num_prompt
            self.ids += pack_ids(ANSWER[known : self.num_tokens])
            self.hashes = extend_hashes(self.hashes, self.ids[: 4 * self.kv_len])
        return block_names(self.hashes, block_size)[: self.kv_len // block_size]

    @property
    def generated_hashes(self) -> bytes:
        self.names(HASHED_TOKENS)
        return self.hashes[len(self.start.request.block_hashes) :]


def candidates(group: BeamGroup) -> list[Candidate]:
    """Continuations of which none ends a beam."""
    num_beams = len(group.search.beams)
    return [Candidate(i % num_beams, FIRST_ID + i, -1.0, -1.0) for i in range(group.search.params.width)]


@dataclass
class SimulatedWorker:
    """A worker that ends rows at their last token (`ends_at`) or their limit, and releases each some reports
    later (`draw`).
    """

    block_size: int
    draw: random.Random
    eos_chance: float = 0.02
    num_speculated: int = 0
    rows: dict[int, SimulatedRow] = field(default_factory=dict)
    leaving: list[tuple[int, SimulatedRow]] = field(default_factory=list)
    owned: dict[int, set[int]] = field(default_factory=dict)
    contents: dict[int, bytes] = field(default_factory=dict)
    computed: Counter[str] = field(default_factory=Counter)
    committed: dict[str, int] = field(default_factory=dict)
    plan: int = 0
    sequence: int = 0
    num_prefilled: int = 0
    num_decoded: int = 0
    most_rows: int = 0
    last_row: int = 0
    ended_requests: set[str] = field(default_factory=set)
    report: Report = field(init=False)

    def __post_init__(self) -> None:
        self.adapters: dict[str, Adapter] = {}
        self.engine = Rows(self.block_size, [EOS], prefix_caching=True, adapters=self.adapters)
        self.clear()

    @property
    def step(self) -> int:
        return self.engine.step

    @property
    def until(self) -> int:
        return self.engine.grant.until

    @property
    def report_at(self) -> int:
        return self.engine.grant.report_at

    def clear(self) -> None:
        self.sequence += 1
        self.report = Report(self.sequence, 1, self.plan, self.step)

    def apply_plan(self, plan: Plan) -> None:
        assert plan.number > self.plan, "plans come in order"
        self.plan = plan.number
        self.adapters |= {one.request.adapter: Adapter(one.request.adapter) for one in plan.starts}
        self.engine.apply(replace(plan, until=max(self.until, plan.until)))
        self.note(self.engine.take_result())
        for number, blocks in plan.blocks:
            if number in self.rows:
                self.own(number, unpack_ids(blocks))
        for start in plan.starts:
            assert start.row > self.last_row, "row numbers go on"
            self.last_row = start.row
            row = self.engine.rows[start.row]
            row.goes_on_from = NEVER
            row.proposer = KnowingProposer(
                ANSWER, start.base, 0, self.draw.randrange(2**32), [], self.num_speculated, False
            )
            self.rows[start.row] = simulated = SimulatedRow(start, row)
            num_shared, held = start.num_cached // self.block_size, unpack_ids(start.blocks)
            self.share(simulated, held[:num_shared])
            self.own(start.row, held[num_shared:])

    def share(self, row: SimulatedRow, blocks: list[int]) -> None:
        assert len(blocks) * self.block_size == row.start.num_cached < len(row.row.ids)
        for name, block in zip(row.names(self.block_size), blocks, strict=True):
            held = self.contents.get(block)
            assert held == name, f"block {block} holds {held!r}"
            self.owned.setdefault(block, set()).add(row.start.row)

    def own(self, number: int, blocks: list[int]) -> None:
        for block in blocks:
            assert block > 0, "block 0 is scratch"
            assert block not in self.owned, (
                f"block {block} was handed out before row {self.owned.get(block)} was released"
            )
            self.owned[block] = {number}
            self.contents.pop(block, None)

    def end(self, number: int, why: str) -> None:
        row = self.rows.pop(number)
        self.report.ended.append((number, why, row.num_tokens))
        self.leaving.append((number, row))
        if why not in INTERRUPTED:
            self.ended_requests.add(row.start.request.request_id)

    def run(self) -> bool:
        """Run one step, if one is granted and a row can take part."""
        slices = self.engine.launch()
        self.most_rows = max(self.most_rows, len(slices))
        ids = [self.sample(one, place) for one in slices for place in range(one.num_samples)]
        outputs = {number: row.output for number, row in self.engine.rows.items()}
        found = {number: candidates(one) for number, one in outputs.items() if isinstance(one, BeamGroup)}
        self.engine.collect(slices, StepSamples(ids, [0.0] * len(ids), candidates=found))
        for one in slices:
            self.fill(self.rows[one.row.number], one)
        self.note(self.engine.take_result())
        return bool(slices)

    def sample(self, one: RowSlice, place: int) -> int:
        index = one.first_index + place
        request_id = self.rows[one.row.number].start.request.request_id
        return EOS if ends_at(request_id, index + 1, self.eos_chance) else generated_id(index)

    def fill(self, row: SimulatedRow, one: RowSlice) -> None:
        """Note what a row has computed: blocks that are full now hold its ids."""
        count, request = max(0, row.kv_len - one.begin), row.start.request
        self.computed[request.tenant] += count
        if one.decodes:
            self.num_decoded += count
            row.is_ahead |= count > 1
        else:
            self.num_prefilled += count
        if row.num_tokens > row.start.base:
            self.committed[request.request_id] = row.num_tokens
        filled = range(one.begin // self.block_size, row.kv_len // self.block_size)
        if filled and (names := row.names(self.block_size)):
            for i in filled:
                self.contents[int(row.row.blocks[i])] = names[i]

    def note(self, result: StepResult) -> None:
        """Report what a step has brought."""
        for number, kv_len in result.prefilled:
            self.rows[number].told_as = kv_len, self.step
            self.report.prefilled.append((number, kv_len, self.step))
        for number, why, _ in result.ended:
            self.end(number, why)

    def release(self) -> None:
        """Release rows that have ended, some sooner and some later."""
        staying = []
        for number, row in self.leaving:
            if self.draw.random() < 0.5:
                staying.append((number, row))
                continue
            for block in row.row.blocks.tolist():
                self.owned[block].remove(number)
                if not self.owned[block]:
                    del self.owned[block]
            self.report.released.append((number, row.kv_len))
            if hashes := row.generated_hashes:
                self.report.hashes.append((number, hashes))
        self.leaving = staying

    def answer_takeover(self, epoch: int) -> Report:
        """Answer with the rows that it holds. Unread reports are lost, as those to an earlier batcher are."""
        self.take_lengths()
        self.clear()
        self.plan = 1
        held = [self.held(number, row, False) for number, row in self.rows.items()]
        held += [self.held(number, row, True) for number, row in self.leaving]
        return Report(self.sequence, epoch, 1, self.step, takeover=True, held=held, last_row=self.last_row)

    def held(self, number: int, row: SimulatedRow, ended: bool) -> HeldRow:
        start, (kv_len, step), blocks = row.start, row.told_as, row.row.blocks.tobytes()
        own = number, start.request.request_id, start.attempt, start.base
        return HeldRow(*own, row.num_tokens, blocks, kv_len, step, ended, start.num_cached)

    def take_lengths(self) -> list[tuple[int, int, int]]:
        """Take the lengths of rows that are ahead of one token a step."""
        ahead = [(number, row) for number, row in self.rows.items() if row.is_ahead]
        for _, row in ahead:
            row.told_as, row.is_ahead = (row.kv_len, self.step), False
        return [(number, *row.told_as) for number, row in ahead]

    def take_report(self) -> Report:
        report = replace(self.report, plan=self.plan, step=self.step, lengths=self.take_lengths())
        self.clear()
        return report


# --- simulated pool -----------------------------------------------------------------------------------------

BLOCK_SIZE = 16


def request(
    name: str, num_prompt: int, max_new_tokens: int, entry: int = 0, ttl_ms: int = 60_000, gateway: str = ""
) -> Sequence:
    """Make a request; without a gateway it is a job."""
    generate = Generate(
        name, "d", pack_ids(range(num_prompt)), StoppingParams(max_new_tokens), gateway=gateway
    )
    return Sequence(generate, f"1000-{entry}", 1000 + ttl_ms)


def sharing_request(
    name: str, prompt: list[int], max_new_tokens: int, entry: int = 0, salt: str = "", num_choices: int = 1
) -> Sequence:
    """Make a request that may share blocks with others."""
    ids = pack_ids(prompt)
    hashes = extend_hashes(root_hash(salt), ids)
    stopping = StoppingParams(max_new_tokens)
    generate = Generate(name, "d", ids, stopping, block_hashes=hashes, num_choices=num_choices)
    return Sequence(generate, f"1000-{entry}", 10**9)


def make_replica(num_blocks: int = 10, max_batch_size: int = 4) -> Replica:
    """Make what the scheduler knows of a worker, without one."""
    capacity = WorkerCapacity("w1", "w0", "m", "float32", BLOCK_SIZE, num_blocks, 64, 4096)
    return Replica(capacity, WorkerLimits(max_batch_size, 32))


def make_sequence(num_prompt: int, max_new_tokens: int = 100) -> Sequence:
    stopping = StoppingParams(max_new_tokens)
    return Sequence(Generate("r", "d", pack_ids([1] * num_prompt), stopping), "1-0", 10**15)


class Pool:
    """A scheduler, simulated workers, and a loop between them."""

    def __init__(
        self,
        num_workers: int,
        num_blocks: int,
        seed: int,
        limits: WorkerLimits | None = None,
        eos_chance: float = 0.02,
        shares: bool = True,
        standby: bool = True,
        num_speculated: int = 0,
    ) -> None:
        self.standby = standby
        self.random = random.Random(seed)
        self.shares = shares
        self.eos_chance = eos_chance
        self.num_speculated = num_speculated
        self.scheduler = Scheduler(limits or WorkerLimits(), epoch=1)
        self.workers: dict[str, SimulatedWorker] = {}
        self.num_blocks = num_blocks
        self.finished: list[str] = []
        self.to_finish: list[tuple[str, str]] = []
        self.committed: dict[str, int] = {}
        self.num_added = 0
        self.attempts: dict[str, int] = {}
        self.num_resumed = 0
        for _ in range(num_workers):
            self.add_worker()

    def add_worker(self) -> str:
        name = f"w{self.num_added}"
        self.num_added += 1
        self.workers[name] = SimulatedWorker(BLOCK_SIZE, self.random, self.eos_chance, self.num_speculated)
        self.scheduler.workers.add(Replica(self.capacity(name), self.scheduler.limits))
        return name

    def capacity(self, name: str) -> WorkerCapacity:
        sizes = (BLOCK_SIZE, self.num_blocks, 64, 4096)
        return WorkerCapacity(
            name, name, "m", "float32", *sizes, prefix_caching=self.shares, standby=self.standby
        )

    def add(self, *sequences: Sequence) -> None:
        for sequence in sequences:
            self.scheduler.register(sequence)
            self.scheduler.enqueue(sequence)

    def decide(self) -> None:
        for pending in self.scheduler.plans():
            self.publish(pending)
        outcomes = self.scheduler.pop_outcomes()
        for sequence in outcomes.finished:
            self.finished.append(sequence.request_id)
            self.scheduler.forget(sequence)
        for sequence, why in outcomes.to_finish:
            self.to_finish.append((sequence.request_id, why))
            self.scheduler.forget(sequence)
        for sequence in outcomes.interrupted:
            self.resume(sequence)
        assert all(
            worker.most_rows <= self.scheduler.limits.max_batch_size for worker in self.workers.values()
        )

    def publish(self, pending: PendingPlan) -> None:
        self.workers[pending.replica.capacity.incarnation].apply_plan(pending.plan)
        for start in pending.plan.starts:
            self.attempts[start.request.request_id] = start.attempt

    def resume(self, sequence: Sequence) -> None:
        num_tokens = self.committed.get(sequence.request_id, 0)
        sequence.commit(b"".join(RECORD.pack(generated_id(i), 0.0) for i in range(num_tokens)))
        self.scheduler.resume(sequence)

    def turn(self) -> None:
        self.decide()
        for name, worker in self.workers.items():
            for _ in range(self.random.randint(1, 12)):
                worker.run()
            worker.release()
            grown = {one: n for one, n in worker.committed.items() if n > self.committed.get(one, 0)}
            self.committed |= grown
            self.scheduler.apply_report(name, worker.take_report())

    def kill(self, name: str) -> None:
        del self.workers[name]
        for sequence in self.scheduler.remove_worker(name):
            self.resume(sequence)

    def disturb(self, action: str, num_requests: int) -> None:
        """Kill or drain a worker, cancel one of the requests r0, r1 …, or replace the batcher, chosen at
        random. Other actions change nothing.
        """
        name = self.random.choice(list(self.workers))
        match action:
            case "kill":
                self.kill(name)
                self.add_worker()
            case "succeed":
                self.succeed()
            case "drain":
                self.scheduler.workers.drain(name)
                self.add_worker()
            case "cancel":
                self.scheduler.cancel(f"r{self.random.randrange(num_requests)}", "client")

    def succeed(self) -> None:
        """Let the batcher die with unpublished plans; a new one adopts what workers hold."""
        list(self.scheduler.plans())
        before, self.scheduler = self.scheduler, Scheduler(self.scheduler.limits, self.scheduler.epoch + 1)
        left = {}
        for name, old in before.sequences.items():
            left[name] = Sequence(old.request, old.entry_id, old.deadline_ms)
            left[name].attempt = self.attempts.get(name, 0)
            left[name].stop_reason = old.stop_reason
            self.scheduler.register(left[name])
        for name, worker in self.workers.items():
            ended = worker.ended_requests
            rest = self.scheduler.add_worker(
                self.capacity(name), worker.answer_takeover(self.scheduler.epoch), list(left.values())
            )
            left = {sequence.request_id: sequence for sequence in rest}
            for request_id in ended & left.keys():
                self.finished.append(request_id)
                self.scheduler.forget(left.pop(request_id))
        for sequence in left.values():
            self.num_resumed += 1
            self.resume(sequence)

    def run(self, max_turns: int = 3000) -> None:
        for _ in range(max_turns):
            if not self.scheduler.sequences:
                return
            self.turn()
        raise AssertionError(f"{len(self.scheduler.sequences)} requests never ended")

    def check_blocks_returned(self) -> None:
        for _ in range(50):
            self.turn()
        for replica in self.scheduler.replicas.values():
            assert replica.pool.num_free == replica.pool.num_blocks
            assert not replica.rows and replica.num_running == 0

    def check_blocks(self) -> None:
        """Each block is free, cached, or has rows; the blocks before a cached one are cached."""
        for replica in self.scheduler.replicas.values():
            pool, cache = replica.pool, replica.pool.cache
            has = Counter(block for row in replica.rows.values() for block in row.blocks)
            has += Counter(block for blocks in replica.leaving.values() for block in blocks)
            assert sorted([*pool.free, *cache.idle, *has]) == list(range(1, pool.num_blocks + 1))
            assert pool.others == {block: count - 1 for block, count in has.items() if count > 1}
            assert pool.num_free + len(has) == pool.num_blocks
            assert {block: name for name, block in cache.blocks.items()} == cache.names
            assert cache.idle.keys() <= cache.names.keys()


# --- late pool ----------------------------------------------------------------------------------------------

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
