"""A scheduler, and simulated workers that obey its plans, without Redis."""

import random
from collections import Counter

from batcher.scheduling.plan_builder import PendingPlan
from batcher.scheduling.replica import Replica, WorkerLimits
from batcher.scheduling.scheduler import Scheduler
from batcher.scheduling.sequence import Sequence
from common.messages.plan import WorkerCapacity
from common.messages.records import RECORD, pack_ids
from common.messages.request import Generate, StoppingParams, extend_hashes, root_hash
from tests.support.fleet.simulated_worker import SimulatedWorker, generated_id

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


def make_replica(num_blocks: int = 10, max_batch_size: int = 4, horizon: int = 32) -> Replica:
    """Make what the scheduler knows of a worker, without one."""
    capacity = WorkerCapacity("w1", "w0", "m", "float32", BLOCK_SIZE, num_blocks, 64, 4096)
    return Replica(capacity, WorkerLimits(max_batch_size, horizon))


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
