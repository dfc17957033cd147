"""Who runs where: a pure function of requests, reports, limits and the time it is given. No I/O, no clock, no
torch.

The loop tells it what happened (`register`, `enqueue`, `resume`, `cancel`, `join`, `drain`, `take_in`,
`lose`, `expire`) and asks for plans. What it cannot do itself it leaves in `outcomes`: sequences that ended,
that must be ended, or whose committed tokens must be read before they go on.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

from batcher.pending_plan import Order
from batcher.replica import Limits, Replica
from batcher.sequence import Row, Sequence
from common.messages.finish_reasons import INTERRUPTED
from common.messages.packing import pack_ids
from common.messages.plan import Plan, Report, RowStart, WorkerCapacity

MAX_CRASHES = 2
"""A request under which so many incarnations died, without a token committed beyond its base, is failed."""


@dataclass(slots=True)
class Outcomes:
    """What the loop has to do for the scheduler.

    Attributes:
        settled: their terminal is said; their entries go.
        unwanted: (sequence, why): no worker holds them, their terminal is the batcher's to say.
        interrupted: their row ended early; what is committed must be read, then they go on.
    """

    settled: list[Sequence] = field(default_factory=list)
    unwanted: list[tuple[Sequence, str]] = field(default_factory=list)
    interrupted: list[Sequence] = field(default_factory=list)


class Scheduler:
    """Continuous batching over the workers of one pool.

    Attributes:
        sequences: every live request, by id.
        replicas: every worker that may be given rows, by incarnation.
    """

    def __init__(self, limits: Limits, epoch: int) -> None:
        self.limits = limits
        self.epoch = epoch
        self.sequences: dict[str, Sequence] = {}
        self.replicas: dict[str, Replica] = {}
        self.queue: list[tuple[tuple[int, int, int], Sequence]] = []
        self.deadlines: list[tuple[int, str]] = []
        self.outcomes = Outcomes()

    def figures(self) -> dict[str, int]:
        """What is held: workers, live requests, those of them that wait, rows and KV blocks on workers."""
        replicas = self.replicas.values()
        return {
            "workers": len(replicas),
            "requests": len(self.sequences),
            "waiting": sum(sequence.waiting for _, sequence in self.queue),
            "rows": sum(len(replica.rows) for replica in replicas),
            "blocks": sum(replica.pool.num_blocks - replica.pool.num_free for replica in replicas),
        }

    def register(self, sequence: Sequence) -> None:
        """A live request, which `enqueue` or `resume` puts in the queue."""
        self.sequences[sequence.request_id] = sequence
        heapq.heappush(self.deadlines, (sequence.deadline_ms, sequence.request_id))

    def enqueue(self, sequence: Sequence) -> None:
        if sequence.asked_to_end or sequence.crash_count >= MAX_CRASHES:
            self.outcomes.unwanted.append((sequence, sequence.asked_to_end or "poison"))
            return
        sequence.waiting = True
        heapq.heappush(self.queue, (sequence.order, sequence))

    def resume(self, sequence: Sequence) -> None:
        """An interrupted request goes on, before all new ones and the shortest first: it is the quickest to
        come back.
        """
        if sequence.waiting or sequence.row is not None:
            return
        sequence.order = (0, sequence.num_known, sequence.rank)
        self.enqueue(sequence)

    def take_outcomes(self) -> Outcomes:
        taken, self.outcomes = self.outcomes, Outcomes()
        return taken

    def cancel(self, request_id: str, why: str) -> None:
        sequence = self.sequences.get(request_id)
        if sequence is None or sequence.asked_to_end:
            return
        sequence.asked_to_end = why
        if sequence.waiting:
            sequence.waiting = False
            self.outcomes.unwanted.append((sequence, why))

    def expire(self, now_ms: int) -> None:
        """Ends what has outlived its deadline."""
        while self.deadlines and self.deadlines[0][0] <= now_ms:
            self.cancel(heapq.heappop(self.deadlines)[1], "timeout")
        if len(self.deadlines) > 2 * len(self.sequences) + 1000:
            self.deadlines = [(sequence.deadline_ms, name) for name, sequence in self.sequences.items()]
            heapq.heapify(self.deadlines)

    def forget(self, sequence: Sequence) -> None:
        """The request has its terminal and is settled."""
        self.sequences.pop(sequence.request_id, None)

    def join(self, capacity: WorkerCapacity) -> Replica:
        """A worker that holds nothing and may be given rows."""
        replica = self.replicas[capacity.incarnation] = Replica(capacity, self.limits)
        return replica

    def drain(self, incarnation: str) -> None:
        """The worker wants to leave: its rows go on elsewhere."""
        if (replica := self.replicas.get(incarnation)) is not None:
            replica.draining = True

    def lose(self, incarnation: str) -> list[Sequence]:
        """The worker is dead and its logs are sealed. Returns the requests that it held: what killed it,
        perhaps, unless it was leaving.
        """
        replica = self.replicas.pop(incarnation, None)
        if replica is None:
            return []
        held = list(replica.running)
        for row in held:
            row.sequence.row = None
            row.sequence.suspect = row.handed_over and not replica.draining
        return [row.sequence for row in held]

    def take_in(self, incarnation: str, report: Report) -> None:
        """Moves the rows of a worker on."""
        replica = self.replicas[incarnation]
        replica.step = max(replica.step, report.step)
        replica.acknowledged = report.sequence
        replica.plan_seen = max(replica.plan_seen, report.plan)
        for number, kv_len, step in report.prefilled:
            if (row := replica.rows.get(number)) is not None:
                row.kv_len, row.at_step = kv_len, step
                row.sequence.crash_count = 0
        for number, why, _ in report.ended:
            if (row := replica.rows.get(number)) is not None and not row.ended:
                replica.end(row)
                (self.outcomes.interrupted if why in INTERRUPTED else self.outcomes.settled).append(
                    row.sequence
                )
        for number, _ in report.released:
            if (row := replica.rows.get(number)) is not None:
                replica.release(row)

    def plans(self) -> Iterator[Order]:
        """A plan for each worker for which something changes, with the rows that it starts."""
        starts = self.place()
        for incarnation, replica in self.replicas.items():
            started = starts.get(incarnation, [])
            if (plan := self.plan(replica, started)) is not None:
                yield Order(replica, plan, started)

    def place(self) -> dict[str, list[Row]]:
        """Starts what waits, in order, each on the least loaded worker that can take it."""
        starts: dict[str, list[Row]] = {}
        held_back = []
        while self.queue:
            order, sequence = heapq.heappop(self.queue)
            if not sequence.waiting:
                continue
            if self.replicas and not any(replica.can_hold(sequence) for replica in self.replicas.values()):
                sequence.waiting = False
                self.outcomes.unwanted.append((sequence, "capacity"))
                continue
            able = [replica for replica in self.replicas.values() if replica.can_start(sequence)]
            if not able:
                held_back.append((order, sequence))
                if not sequence.crash_count:
                    break
                continue
            replica = min(able, key=lambda one: one.load)
            starts.setdefault(replica.capacity.incarnation, []).append(replica.start(sequence))
        for item in held_back:
            heapq.heappush(self.queue, item)
        return starts

    def plan(self, replica: Replica, started: list[Row]) -> Plan | None:
        """What is new for a worker: rows that start, blocks for rows that grow, rows that stop, and steps to
        run; None if nothing is.
        """
        low = replica.low
        blocks = self.grow(replica, started) if low else []
        stops = self.stops(replica, started)
        if not (started or low or stops):
            return None
        if low:
            replica.until = replica.step + self.limits.horizon
        replica.plan += 1
        return Plan(
            epoch=self.epoch,
            number=replica.plan,
            until=replica.until,
            prefill_tokens=replica.capacity.max_batch_prefill_tokens,
            starts=[start(row) for row in started],
            blocks=blocks,
            stops=stops,
            acknowledged=replica.acknowledged,
        )

    def grow(self, replica: Replica, started: list[Row]) -> list[tuple[int, bytes]]:
        """Blocks for the steps about to be granted, oldest row first; when they run out the youngest row is
        preempted.
        """
        grown = []
        until = replica.step + self.limits.horizon
        replica.starved = False
        for row in list(replica.running):
            if row.stopping or row in started:
                continue
            missing = replica.blocks_for(row.kv_at(until, replica.step)) - len(row.blocks)
            if missing <= 0:
                continue
            if not replica.pool.can_take(missing):
                self.make_room(replica, row)
                replica.starved = True
                missing = min(missing, replica.pool.num_free)
            if missing:
                taken = replica.pool.take(missing)
                row.blocks += taken
                grown.append((row.number, pack_ids(taken)))
        return grown

    def make_room(self, replica: Replica, row: Row) -> None:
        """Preempts the youngest row for the sake of an older one, unless one is on its way out: its blocks
        come with its release.
        """
        running = [one for one in replica.running if not one.stopping]
        leaving = any(one.stopping or one.ended for one in replica.rows.values())
        if not leaving and len(running) > 1 and running[-1] is not row:
            running[-1].stopping = "preempt"

    def stops(self, replica: Replica, started: list[Row]) -> list[tuple[int, str]]:
        """Rows to stop that were not told so yet. A row that starts with this plan is told with the next: a
        plan's stops come first.
        """
        asked = []
        for row in replica.running:
            why = row.sequence.asked_to_end or (
                "preempted" if replica.draining or row.stopping == "preempt" else ""
            )
            if why and row.stopping in ("", "preempt") and row not in started:
                row.stopping = why
                asked.append((row.number, why))
        return asked


def start(row: Row) -> RowStart:
    sequence = row.sequence
    return RowStart(
        row.number, sequence.attempt, sequence.base, sequence.records, pack_ids(row.blocks), sequence.request
    )
