"""A scheduler and simulated workers that obey its plans, without Redis: the agent's own reports of the
engine's own rows. A worker complains when a plan breaks the rules of blocks. In a LatePool plans and reports
come some steps late.
"""

import random
from collections import Counter, deque
from collections.abc import Sequence as Items
from dataclasses import replace
from itertools import count
from typing import Any
from zlib import crc32

from redis.asyncio import Redis

from batcher.scheduling.plan_builder import PendingPlan
from batcher.scheduling.replica import Replica, WorkerLimits
from batcher.scheduling.scheduler import Scheduler
from batcher.scheduling.sequence import Sequence
from common.broker.keys import Keys
from common.broker.pool_client import PoolClient
from common.messages.plan import NewRow, Plan, Report, WorkerCapacity
from common.messages.records import RECORD, pack_ids, unpack_ids
from common.messages.request import Generate, StoppingParams, extend_hashes, root_hash
from common.settings.settings import Settings
from gpu_worker.agent.agent import Agent
from gpu_worker.agent.row_text import RowText
from gpu_worker.agent.state import AgentState, Outbox
from gpu_worker.engine.batch.beams import BeamGroup
from gpu_worker.engine.batch.row import Adapter, RowSlice, confirmed
from gpu_worker.engine.batch.step_result import Candidate, StepSamples
from gpu_worker.engine.drafting.proposers import Proposer
from gpu_worker.protocol import StepResult
from tests.support.chaos.engine import BLOCK_SIZE
from tests.support.fleet.modeless_worker import ModelessEngine
from tests.support.speculation.knowing_proposer import KnowingProposer
from tests.support.tokenizer import TOKENIZER

EOS = 2
ANSWER = range(10_000, 49_000)
"""What every request generates, up to its end."""


def generated_id(index: int) -> int:
    """The token that every request generates at this index."""
    return ANSWER[index]


def ends_at(request_id: str, num_tokens: int, chance: float) -> bool:
    """Whether a request's token at this index ends it, on every worker and in every attempt."""
    return crc32(f"{request_id} {num_tokens}".encode()) < chance * 2**32


class SimulatedWorker(ModelessEngine):
    """An agent, and its engine, which ends rows at their last token (`ends_at`) or their limit. Each row is
    released some reports later (`draw`).

    Attributes:
        owned: the rows that have a block, by block.
        leaving: (row, kv_len) of those that are to be released.
        computed: tokens, by tenant; `num_prefilled` and `num_decoded` of these.
        committed: tokens of each request, by its id.
        ended_requests: ids of those that have ended; `interrupted`: rows whose requests go on elsewhere.
        step_times, round_trips: what the next report says of them.
    """

    def __init__(
        self, capacity: WorkerCapacity, draw: random.Random, eos_chance: float = 0.02, num_speculated: int = 0
    ) -> None:
        super().__init__(0.0, num_speculated=num_speculated, eos_ids=[EOS])
        pool = PoolClient(Redis(), Keys("default"))
        self.agent = Agent(Settings(), pool, self, AgentState(TOKENIZER), capacity)
        self.draw, self.eos_chance = draw, eos_chance
        self.owned: dict[int, set[int]] = {}
        self.leaving: list[tuple[int, int]] = []
        self.computed, self.committed = Counter[str](), dict[str, int]()
        self.ended_requests: set[str] = set()
        self.interrupted: list[RowText] = []
        self.step_times: list[tuple[int, int, int, float]] = []
        self.round_trips: list[float] = []
        self.sequence = self.num_prefilled = self.num_decoded = 0

    @property
    def live(self) -> dict[int, RowText]:
        """Rows that have not ended, by number."""
        return {row.row: row for row in self.agent.state.live}

    @property
    def report(self) -> Report:
        """What the next report says of rows."""
        return self.agent.state.outbox.report

    def apply_plan(self, plan: Plan) -> None:
        assert plan.number > self.agent.state.plan.number, "plans come in order"
        self.agent.plans.apply(plan)
        result = self.rows.take_result()
        result.step = self.rows.step
        self.note(result)

    def send(self, plan: Plan) -> None:
        """Take a plan of the agent, which knows its rows by now."""
        self.adapters |= {one.request.adapter: Adapter(one.request.adapter) for one in plan.starts}
        for number, blocks in plan.blocks:
            if number in self.agent.state.rows:
                self.own(number, unpack_ids(blocks))
        for start in plan.starts:
            num_shared, held = start.num_cached // BLOCK_SIZE, unpack_ids(start.blocks)
            assert num_shared * BLOCK_SIZE == start.num_cached < len(start.ids) // 4
            for block in held[:num_shared]:
                self.owned.setdefault(block, set()).add(start.row)
            self.own(start.row, held[num_shared:])
        self.apply(plan)

    def own(self, number: int, blocks: list[int]) -> None:
        for block in blocks:
            assert block > 0, "block 0 is scratch"
            assert block not in self.owned, (
                f"block {block} was handed out before row {self.owned.get(block)} was released"
            )
            self.owned[block] = {number}

    def holds_others(self, block: int, ids: bytes, place: int) -> bool:
        assert not super().holds_others(block, ids, place), f"block {block} has other ids"
        return False

    def proposer_of(self, start: NewRow) -> Proposer:
        seed = self.draw.randrange(2**32)
        return KnowingProposer(ANSWER, start.base, 0, seed, [], self.num_speculated, False)

    def fill_blocks(self, slices: Items[RowSlice]) -> None:
        """Count what is computed. Blocks of rows that share none are not looked at."""
        sharing = []
        for one in slices:
            request = self.agent.state.rows[one.row.number].request
            self.computed[request.tenant] += one.count
            self.num_decoded += one.count if one.decodes else 0
            self.num_prefilled += 0 if one.decodes else one.count
            sharing += [one] if request.block_hashes else []
        super().fill_blocks(sharing)

    def forward(self, slices: Items[RowSlice]) -> StepSamples:
        """No continuation of a beam search ends a beam."""
        samples = super().forward(slices)
        for number, row in self.rows.rows.items():
            if isinstance(row.output, BeamGroup):
                width, num_beams = row.output.search.params.width, len(row.output.search.beams)
                found = [Candidate(i % num_beams, ANSWER[i], -1.0, -1.0) for i in range(width)]
                samples.candidates[number] = found
        return samples

    def sample(self, one: RowSlice) -> list[int]:
        request_id = self.agent.state.rows[one.row.number].request.request_id
        sampled = [
            EOS if ends_at(request_id, index + 1, self.eos_chance) else generated_id(index)
            for index in range(one.first_index, one.first_index + one.num_samples)
        ]
        self.ids[one.row.number] += pack_ids(confirmed(sampled, one.proposed))
        return sampled

    def run(self) -> bool:
        """Run one step, if one is granted and a row can take part."""
        before = self.rows.step
        if (result := self.step()) is not None:
            self.note(result)
        return self.rows.step > before

    def note(self, result: StepResult) -> None:
        """Give the agent what a step or a plan has brought, but what is released, and publish it."""
        self.leaving += result.released
        result.released = []
        self.agent.steps.apply(result)
        outbox = self.agent.state.outbox
        for row in outbox.rows:
            self.committed[row.request.request_id] = row.num_tokens
            row.texts.clear()
        self.ended_requests |= {row.request.request_id for row, _ in outbox.terminals}
        self.interrupted += outbox.interrupted
        for published in (outbox.rows, outbox.terminals, outbox.interrupted):
            published.clear()

    def release(self) -> None:
        """Release rows that have ended, some sooner and some later."""
        staying, released = list[tuple[int, int]](), list[tuple[int, int]]()
        for one in self.leaving:
            (staying if self.draw.random() < 0.5 else released).append(one)
        self.leaving = staying
        for number, _ in released:
            for block in unpack_ids(self.agent.state.rows[number].blocks):
                self.owned[block].remove(number)
                if not self.owned[block]:
                    del self.owned[block]
        self.agent.steps.apply(StepResult(self.rows.step, released=released))

    def answer_takeover(self, epoch: int) -> Report:
        """Answer with the rows that it holds. Unread reports are lost, as those to an earlier batcher are."""
        self.agent.state.outbox = Outbox()
        self.agent.plans.apply(Plan(epoch, 1, 0, 0, takeover=True))
        return self.take_report()

    def take_report(self) -> Report:
        outbox, self.agent.state.outbox = self.agent.state.outbox, Outbox()
        self.sequence += 1
        report = self.agent.flusher.make_report(outbox, self.sequence)
        times, self.step_times = self.step_times, []
        trips, self.round_trips = self.round_trips, []
        return replace(report, step_times=times, round_trips=trips)


# --- simulated pool -----------------------------------------------------------------------------------------


def request(name: str, num_prompt: int, max_new_tokens: int, entry: int = 0, **fields: Any) -> Sequence:
    """A request that was queued at 1,000 ms, with these fields of Generate; without a gateway it is a job."""
    stopping = StoppingParams(max_new_tokens)
    generate = Generate(name, "d", pack_ids(range(num_prompt)), stopping, **fields)
    return Sequence(generate, f"1000-{entry}", 1000 + generate.ttl_ms)


def sharing_request(
    name: str, prompt: list[int], max_new_tokens: int, entry: int = 0, **fields: Any
) -> Sequence:
    """A request that may share blocks with others."""
    ids, made = pack_ids(prompt), request(name, 0, max_new_tokens, entry, **fields)
    asked = replace(made.request, prompt_ids=ids, block_hashes=extend_hashes(root_hash(""), ids))
    return Sequence(asked, made.entry_id, made.deadline_ms)


def make_replica(num_blocks: int = 10, max_batch_size: int = 4) -> Replica:
    """Make what the scheduler knows of a worker, without one."""
    capacity = WorkerCapacity("w1", "w0", "m", "float32", BLOCK_SIZE, num_blocks, 64, 4096)
    return Replica(capacity, WorkerLimits(max_batch_size, 32))


def make_sequence(num_prompt: int, max_new_tokens: int = 100, **fields: Any) -> Sequence:
    return request("r", num_prompt, max_new_tokens, **fields)


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
        self.workers[name] = SimulatedWorker(
            self.capacity(name), self.random, self.eos_chance, self.num_speculated
        )
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


class LatePool(Pool):
    """A worker with thrice as many requests as places, so that others wait. A tick is the time of a step.

    Attributes:
        late: ticks that a plan or a report takes.
        taken: places that rows had, by tick.
    """

    def __init__(
        self,
        late: int,
        limits: WorkerLimits,
        num_blocks: int = 2000,
        eos_chance: float = 1 / 128,
        standby: bool = True,
    ) -> None:
        super().__init__(1, num_blocks, 1, limits, eos_chance, shares=False, standby=standby)
        self.late, self.num_places = late, limits.max_batch_size
        self.worker, self.replica = self.workers["w0"], self.scheduler.replicas["w0"]
        self.numbers = count()
        self.plans: deque[tuple[int, Plan]] = deque()
        self.reports: deque[tuple[int, Report]] = deque()
        self.taken: list[int] = []
        self.due_tick = -1
        self.reported_step = 0
        self.num_steps = 0

    @property
    def tick(self) -> int:
        return len(self.taken)

    def run_ticks(self, ticks: int) -> Counter[int]:
        """Run some ticks. Returns in how many of them each number of places was taken."""
        before = self.tick
        for _ in range(ticks):
            while len(self.scheduler.sequences) < 3 * self.num_places:
                number = next(self.numbers)
                self.add(request(f"r{number}", 8, 1000, number))
            self.decide()
            self.deliver_plans()
            ran = self.worker.run()
            self.worker.release()
            self.num_steps += ran
            self.taken.append(min(self.num_places, len(self.worker.live)) * ran)
            self.send_report()
            while self.reports and self.reports[0][0] <= self.tick:
                self.scheduler.apply_report("w0", self.reports.popleft()[1])
        return Counter(self.taken[before:])

    def publish(self, pending: PendingPlan) -> None:
        self.plans.append((self.tick + self.late, pending.plan))

    def deliver_plans(self) -> None:
        while self.plans and self.plans[0][0] <= self.tick:
            plan = self.plans.popleft()[1]
            if self.due_tick >= 0 and plan.report_at > self.worker.rows.grant.report_at:
                self.worker.round_trips.append((self.tick - self.due_tick) * STEP_MS)
                self.due_tick = -1
            self.worker.apply_plan(plan)

    def send_report(self) -> None:
        worker, step = self.worker, self.worker.rows.step
        is_due = step >= worker.rows.grant.report_at > self.reported_step
        if is_due and self.due_tick < 0:
            self.due_tick = self.tick
        if is_due or worker.report.ended or worker.report.released or worker.report.prefilled:
            worker.step_times.append((self.num_steps, self.num_steps, 0, self.num_steps * STEP_MS))
            self.reported_step, self.num_steps = step, 0
            self.reports.append((self.tick + self.late, worker.take_report()))
