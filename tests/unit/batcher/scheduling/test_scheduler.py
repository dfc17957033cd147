"""Scheduler against simulated workers: blocks, budgets, ends, deaths. Every request ends."""

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batcher.scheduling.plan_builder import PendingPlan
from batcher.scheduling.replica import WorkerLimits
from batcher.scheduling.scheduler import Scheduler
from batcher.scheduling.sequence import Sequence
from common.messages.plan import HeldRow, Report
from common.messages.records import pack_ids, unpack_ids
from tests.support.fleet.simulated_pool import Pool, request, sharing_request
from tests.support.fleet.simulated_worker import ends_at, generated_id

LIMITS = WorkerLimits(max_batch_size=16)


class LateBroker(Pool):
    """A pool whose broker writes plans in order, some turns after they were decided.

    Attributes:
        late: plans that are not written.
        cancelled: requests of which the broker knows that they are cancelled; the batcher hears it later.
    """

    def __init__(
        self, num_workers: int, num_blocks: int, seed: int, shares: bool, num_speculated: int
    ) -> None:
        self.late: deque[PendingPlan] = deque()
        self.cancelled: dict[str, None] = {}
        self.unheard: deque[str] = deque()
        super().__init__(num_workers, num_blocks, seed, LIMITS, shares=shares, num_speculated=num_speculated)

    def publish(self, pending: PendingPlan) -> None:
        self.late.append(pending)

    def write(self, pending: PendingPlan) -> None:
        """Write a plan without the rows that are cancelled; none to a worker that is gone."""
        if self.scheduler.replicas.get(pending.replica.capacity.incarnation) is not pending.replica:
            return
        refused = [i for i, row in enumerate(pending.rows) if row.sequence.request_id in self.cancelled]
        for row in self.scheduler.withdraw(pending, refused):
            self.to_finish.append((row.sequence.request_id, "client"))
            self.scheduler.forget(row.sequence)
        super().publish(pending)

    def turn(self) -> None:
        for _ in range(self.random.randint(0, len(self.late))):
            self.write(self.late.popleft())
        if self.unheard and self.random.random() < 0.5:
            self.scheduler.cancel(self.unheard.popleft(), "client")
        super().turn()
        self.check_blocks()

    def disturb(self, action: str, num_requests: int) -> None:
        if action == "cancel":
            name = f"r{self.random.randrange(num_requests)}"
            self.cancelled[name] = None
            self.unheard.append(name)
        else:
            super().disturb(action, num_requests)


sizes = st.tuples(
    st.sampled_from([0, 1000]),
    st.integers(0, 100),
    st.integers(1, 60),
    st.integers(1, 120),
    st.integers(0, 2),
)


@settings(max_examples=250)
@given(
    sizes=st.lists(sizes, min_size=1, max_size=40),
    num_workers=st.integers(1, 3),
    num_blocks=st.integers(20, 80),
    seed=st.integers(0, 10**6),
    actions=st.lists(
        st.sampled_from(["kill", "drain", "cancel", "cancel", "succeed", "next turn", ""]), max_size=12
    ),
    shares=st.booleans(),
    num_speculated=st.sampled_from([0, 1, 5]),
)
def test_every_request_ends_once_with_its_own_tokens_and_every_block_comes_back(
    sizes: list[tuple[int, int, int, int, int]],
    num_workers: int,
    num_blocks: int,
    seed: int,
    actions: list[str],
    shares: bool,
    num_speculated: int,
) -> None:
    """Whatever dies, however late plans are written. `sizes`: of each request the family whose beginning it
    shares, how much of it, its own tokens, those it generates, and its class. Workers complain where a block
    does not hold what it should.
    """
    pool = LateBroker(num_workers, num_blocks, seed, shares, num_speculated)
    requests: list[Sequence] = []

    def ask(prompt: list[int], new: int, class_index: int) -> None:
        requests.append(sharing_request(f"r{len(requests)}", prompt, new, len(requests)))
        requests[-1].class_index = class_index
        pool.add(requests[-1])

    for number, (family, shared, own, new, class_index) in enumerate(sizes):
        own_ids = range(2000 + 100 * number, 2000 + 100 * number + own)
        ask([*range(family, family + shared), *own_ids], new, class_index)
    for action in actions:
        for _ in range(pool.random.randint(1, 12)):
            pool.turn()
        pool.disturb(action, len(sizes))
        if action == "next turn":
            before = pool.random.choice(requests).request
            answered = map(generated_id, range(pool.committed.get(before.request_id, 0)))
            ask([*[*unpack_ids(before.prompt_ids), *answered][:180], 1], 20, 1)
    pool.run()
    cancelled = [name for name, why in pool.to_finish if why == "client"]
    assert len(cancelled) == len(pool.to_finish) and set(cancelled) <= pool.cancelled.keys()
    assert sorted([*pool.finished, *cancelled]) == sorted(one.request_id for one in requests)
    for one in requests:
        name, most = one.request_id, one.request.stopping.max_new_tokens
        if name in pool.finished and name not in pool.cancelled:
            ends = (number for number in range(1, most) if ends_at(name, number, pool.eos_chance))
            assert pool.committed[name] == next(ends, most)
    pool.check_blocks_returned()


def test_rows_go_to_the_least_loaded_worker() -> None:
    pool = Pool(3, num_blocks=200, seed=1)
    pool.add(*(request(f"r{i}", 10, 50, i) for i in range(7)))
    pool.decide()
    assert sorted(replica.num_running for replica in pool.scheduler.replicas.values()) == [2, 2, 3]


def test_a_request_under_which_three_workers_died_is_failed() -> None:
    pool = Pool(1, num_blocks=100, seed=1)
    pool.add(request("r0", 10, 50))
    for crash_count in (1, 2, 3):
        pool.decide()
        assert pool.to_finish == []
        (sequence,) = pool.scheduler.remove_worker(f"w{crash_count - 1}")
        sequence.crash_count = crash_count
        pool.scheduler.resume(sequence)
        del pool.workers[f"w{crash_count - 1}"]
        pool.add_worker()
    pool.decide()
    assert pool.to_finish == [("r0", "poison")]


def test_suspects_start_one_at_a_time() -> None:
    pool = Pool(1, num_blocks=100, seed=1, eos_chance=0)
    suspects = [request(f"r{i}", 10, 50, i) for i in range(3)]
    for one in suspects:
        one.crash_count = 1
    pool.add(*suspects, request("r9", 10, 50, 9))
    pool.decide()
    assert len(pool.workers["w0"].rows) == 2
    assert {row.start.request.request_id for row in pool.workers["w0"].rows.values()} == {"r0", "r9"}
    pool.turn()
    pool.decide()
    assert len(pool.workers["w0"].rows) == 3


def test_a_request_that_no_cache_can_hold_is_refused_and_blocks_nobody() -> None:
    pool = Pool(1, num_blocks=10, seed=1, eos_chance=0)
    pool.add(request("big", 200, 50, 0), request("small", 10, 5, 1))
    pool.run()
    assert pool.to_finish == [("big", "capacity")]
    assert pool.finished == ["small"]


def test_rows_of_requests_that_are_not_known_are_stopped_and_their_blocks_come_back() -> None:
    """So is a row of another attempt than the request's last."""
    pool = Pool(1, num_blocks=100, seed=1, eos_chance=0)
    pool.add(request("r0", 10, 500, 0), request("r1", 10, 500, 1))
    pool.turn()
    pool.scheduler.forget(pool.scheduler.sequences["r0"])
    pool.attempts["r1"] = 2
    pool.succeed()
    assert pool.num_resumed == 1
    (pending,) = pool.scheduler.plans()
    assert pending.plan.stops == [(1, "takeover"), (2, "takeover")]
    assert [start.row for start in pending.plan.starts] == [3]
    pool.workers["w0"].apply_plan(pending.plan)
    pool.run()
    assert pool.finished == ["r1"]
    pool.check_blocks_returned()


def test_a_report_in_which_two_rows_own_a_block_is_refused() -> None:
    pool = Pool(1, num_blocks=100, seed=1)
    blocks = pack_ids([1, 2])
    held = [HeldRow(row, f"r{row}", 1, 0, 0, blocks) for row in (1, 2)]
    scheduler = Scheduler(WorkerLimits(), 2)
    for wrong in (held, [HeldRow(1, "r1", 1, 0, 0, pack_ids([101]))]):
        with pytest.raises(ValueError, match="in use twice"):
            scheduler.add_worker(pool.capacity("w0"), Report(1, 2, 1, 0, takeover=True, held=wrong), [])
    assert not scheduler.replicas
