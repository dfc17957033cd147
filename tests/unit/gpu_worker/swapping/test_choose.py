"""Which model a worker serves next: what holds for all loads, over simulated hours."""

import math
import random
from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.swapping.choose import (
    MAX_SHARE,
    MIN_TURN_S,
    TURN_SWAPS,
    ModelTurn,
    PoolDemand,
    choose,
    choose_first,
)

MAX_QUEUE = 200
TOKENS = 100


@dataclass(slots=True)
class SimulatedRequest:
    came_s: float
    due_s: float
    left_s: float


@dataclass(slots=True)
class SimulatedPool:
    """One model: requests come at a rate, and each takes `work_s` of the worker alone."""

    name: str
    rate: float
    work_s: float
    swap_s: float
    ttl_s: float = 1e9
    queue: deque[SimulatedRequest] = field(default_factory=deque)
    waits: list[float] = field(default_factory=list)
    num_late: int = 0
    left_at_s: float = -math.inf
    asked_s: float = math.inf


class SimulatedWorker:
    """One worker that serves several models in turns, in steps of `look_s`, as `choose` says."""

    def __init__(self, pools: list[SimulatedPool], seed: int, look_s: float = 0.2) -> None:
        self.pools = {pool.name: pool for pool in pools}
        self.own = pools[0]
        self.draw = random.Random(seed)
        self.look_s = look_s
        self.now_s = 0.0
        self.joined_s = 0.0
        self.busy_s = 0.0
        self.num_swaps = 0
        self.swapping_s = 0.0

    def run(self, seconds: float) -> None:
        while self.now_s < seconds:
            self.look()

    def look(self) -> None:
        self.pass_time(self.look_s)
        self.serve(self.look_s)
        if self.own.queue:
            self.busy_s = self.now_s
        turn = ModelTurn(self.demand(self.own), self.now_s - self.joined_s, self.now_s - self.busy_s)
        others = [self.demand(pool) for pool in self.pools.values() if pool is not self.own]
        if (name := choose(turn, others)) is not None:
            self.swap(self.pools[name])

    def swap(self, other: SimulatedPool) -> None:
        self.own.left_at_s = self.now_s
        self.num_swaps += 1
        self.swapping_s += other.swap_s
        self.pass_time(other.swap_s)
        self.own = other
        self.joined_s = self.busy_s = self.now_s

    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        for pool in self.pools.values():
            for _ in range(sum(self.draw.random() < pool.rate * seconds / 8 for _ in range(8))):
                pool.queue.append(SimulatedRequest(self.now_s, self.now_s + pool.ttl_s, pool.work_s))
            while pool.queue and pool.queue[0].due_s < self.now_s:
                pool.queue.popleft()
                pool.num_late += 1
            while len(pool.queue) > MAX_QUEUE:  # refused at admission
                pool.queue.pop()

    def serve(self, seconds: float) -> None:
        while seconds > 0 and self.own.queue:
            first = self.own.queue[0]
            used_s = min(seconds, first.left_s)
            first.left_s -= used_s
            seconds -= used_s
            if first.left_s <= 1e-9:
                self.own.queue.popleft()
                self.own.waits.append(self.now_s - first.came_s)

    def demand(self, pool: SimulatedPool) -> PoolDemand:
        runs = pool is self.own and bool(pool.queue)
        num_waiting = len(pool.queue) - runs
        oldest = pool.queue[int(runs)] if num_waiting else None
        if not oldest or pool is self.own:
            pool.asked_s = math.inf
        elif pool.asked_s == math.inf:
            pool.asked_s = max(oldest.came_s, pool.left_at_s)
        return PoolDemand(
            pool.name,
            num_waiting=num_waiting,
            waiting_tokens=TOKENS * num_waiting,
            waited_s=max(0.0, self.now_s - pool.asked_s),
            due_s=oldest.due_s - self.now_s if oldest else math.inf,
            num_rows=int(runs),
            num_workers=int(pool is self.own),
            swap_s=pool.swap_s,
        )


def busy(name: str, swap_s: float) -> SimulatedPool:
    """A model that is asked for more than one worker can answer."""
    return SimulatedPool(name, rate=4.0, work_s=1.0, swap_s=swap_s, ttl_s=600.0)


@pytest.mark.parametrize("num_pools", [2, 3, 5])
@pytest.mark.parametrize("swap_s", [0.05, 2.0, 30.0])
def test_no_model_starves_though_all_are_overloaded(num_pools: int, swap_s: float) -> None:
    """Each is served again within the longest turns of all others, and swaps take a fifth of the time."""
    pools = [busy(f"m{i}", swap_s) for i in range(num_pools)]
    worker = SimulatedWorker(pools, seed=1, look_s=0.2 + swap_s / 10)
    longest_s = MAX_SHARE * max(MIN_TURN_S, 2 * TURN_SWAPS * swap_s) + swap_s + 5
    while worker.num_swaps < 6 * num_pools:
        worker.look()
        gone_s = [worker.now_s - pool.left_at_s for pool in worker.pools.values() if pool is not worker.own]
        started = worker.num_swaps > num_pools
        assert not started or max(gone_s) <= num_pools * longest_s
    assert all(pool.waits for pool in worker.pools.values())
    assert worker.swapping_s <= 0.25 * worker.now_s


def test_a_rarely_asked_model_does_not_wait_for_a_busy_one_to_be_idle() -> None:
    rare = SimulatedPool("rare", rate=0.01, work_s=0.5, swap_s=2.0)
    worker = SimulatedWorker([busy("busy", 2.0), rare], seed=2)
    worker.run(2000)
    assert len(rare.waits) > 5
    assert max(rare.waits) <= MAX_SHARE * TURN_SWAPS * 4.0 + 2 * 2.0 + 1


def test_an_idle_worker_swaps_at_once() -> None:
    idle = ModelTurn(PoolDemand("own", swap_s=1.0), lasted_s=0.5, idle_s=0.5)
    assert choose(idle, [PoolDemand("other", num_waiting=1, swap_s=1.0)]) == "other"


def test_a_large_swap_waits_for_a_client_that_asks_again_at_once() -> None:
    """A chat whose next question comes a second after the answer is not left for another model each time."""
    own = PoolDemand("own", swap_s=30.0)
    other = PoolDemand("other", num_waiting=1, swap_s=30.0)
    assert choose(ModelTurn(own, lasted_s=20.0, idle_s=1.0), [other]) is None
    assert choose(ModelTurn(own, lasted_s=20.0, idle_s=6.1), [other]) == "other"


def test_a_deadline_ends_a_turn_early() -> None:
    """But not sooner than the swaps for it take, and not if it passes all the same."""
    own = PoolDemand("own", num_waiting=3, waiting_tokens=300, num_rows=1, swap_s=5.0)

    def next_after(lasted_s: float, due_s: float) -> str | None:
        other = PoolDemand("other", num_waiting=1, waiting_tokens=100, due_s=due_s, swap_s=5.0)
        return choose(ModelTurn(own, lasted_s, 0.0), [other])

    assert next_after(12, due_s=600) is None
    assert next_after(12, due_s=20) == "other"
    assert next_after(9, due_s=20) is None
    assert next_after(12, due_s=4) is None


def test_deadlines_of_others_do_not_starve_a_model_without_any() -> None:
    pools = [SimulatedPool(f"u{i}", rate=0.5, work_s=0.5, swap_s=2.0, ttl_s=20.0) for i in range(3)]
    patient = SimulatedPool("patient", rate=0.05, work_s=0.5, swap_s=2.0)
    worker = SimulatedWorker([*pools, patient], seed=5)
    worker.run(3000)
    assert len(patient.waits) > 50 and max(patient.waits) < 4 * MAX_SHARE * TURN_SWAPS * 4 + 30


def test_a_model_with_a_worker_gets_another_only_from_an_idle_one() -> None:
    served = PoolDemand("served", num_waiting=50, waited_s=30.0, num_workers=1, swap_s=2.0)
    working = PoolDemand("own", num_rows=1, swap_s=2.0)
    assert choose(ModelTurn(working, 1000.0, 0.0), [served]) is None
    assert choose(ModelTurn(PoolDemand("own", swap_s=2.0), 10.0, 10.0), [served]) == "served"


def test_a_model_that_cannot_be_woken_is_left_alone() -> None:
    broken = PoolDemand("broken", num_waiting=1, can_wake=False)
    assert choose(ModelTurn(PoolDemand("own"), 100.0, 100.0), [broken]) is None
    assert choose_first([broken]) is None


def test_a_worker_begins_with_the_model_that_has_waited_longest_for_one() -> None:
    waiting = [PoolDemand("a", num_waiting=1, waited_s=1.0), PoolDemand("b", num_waiting=1, waited_s=2.0)]
    served = PoolDemand("c", num_waiting=9, waited_s=9.0, num_workers=1)
    assert choose_first([*waiting, served]) == "b"
    assert choose_first([served]) is None


DEMANDS = st.builds(
    PoolDemand,
    pool=st.just("x"),
    num_waiting=st.integers(0, 1000),
    waiting_tokens=st.integers(0, 10**6),
    waited_s=st.floats(0, 1000),
    due_s=st.floats(-10, 1000),
    num_rows=st.integers(0, 256),
    num_workers=st.integers(0, 3),
    swap_s=st.floats(0, 100),
    can_wake=st.booleans(),
)


@given(DEMANDS, st.lists(DEMANDS, max_size=4), st.floats(0, 1000), st.floats(0, 1000))
def test_a_swap_is_only_ever_to_a_model_that_waits_and_can_be_woken(
    own: PoolDemand, others: list[PoolDemand], lasted_s: float, idle_s: float
) -> None:
    found = choose(ModelTurn(own, lasted_s, idle_s), others)
    assert found is None or any(other.num_waiting and other.can_wake for other in others)
