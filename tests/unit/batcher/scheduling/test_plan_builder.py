"""Plans that are written late: others are decided meanwhile, and rows are refused that were cancelled."""

from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st

from batcher.scheduling.plan_builder import PendingPlan
from batcher.scheduling.replica import WorkerLimits
from tests.support.fleet.simulated_pool import Pool, sharing_request
from tests.unit.batcher.scheduling.test_kv_blocks_prefix_cache import check_blocks

LIMITS = WorkerLimits(max_batch_size=16)


class LateBroker(Pool):
    """A pool whose broker writes plans in order, some turns after they were decided.

    Attributes:
        late: plans that are not written.
        cancelled: requests of which the broker knows that they are cancelled; the batcher hears it later.
    """

    def __init__(self, num_workers: int, num_blocks: int, seed: int) -> None:
        self.late: deque[PendingPlan] = deque()
        self.cancelled: dict[str, None] = {}
        self.unheard: deque[str] = deque()
        super().__init__(num_workers, num_blocks, seed, LIMITS)

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
        for replica in self.scheduler.replicas.values():
            check_blocks(replica)

    def disturb(self, action: str, num_requests: int) -> None:
        if action == "cancel":
            name = f"r{self.random.randrange(num_requests)}"
            self.cancelled[name] = None
            self.unheard.append(name)
        else:
            super().disturb(action, num_requests)


@settings(max_examples=100)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 150), st.integers(1, 80)), min_size=1, max_size=40),
    num_workers=st.integers(1, 3),
    num_blocks=st.integers(20, 80),
    seed=st.integers(0, 10**6),
    actions=st.lists(
        st.sampled_from(["cancel", "cancel", "cancel", "kill", "drain", "succeed"]), max_size=20
    ),
)
def test_every_request_ends_once_though_plans_are_decided_behind_rows_that_are_refused(
    sizes: list[tuple[int, int]], num_workers: int, num_blocks: int, seed: int, actions: list[str]
) -> None:
    pool = LateBroker(num_workers, num_blocks, seed)
    for i, (num_prompt, new) in enumerate(sizes):
        pool.add(sharing_request(f"r{i}", [i % 3] * num_prompt, new, i))
    for action in actions:
        pool.disturb(action, len(sizes))
        pool.turn()
    pool.run()
    ended = pool.finished + [name for name, _ in pool.to_finish]
    assert sorted(ended) == sorted(f"r{i}" for i in range(len(sizes)))
    assert {name for name, why in pool.to_finish if why == "client"} <= pool.cancelled.keys()
    pool.check_blocks_returned()
