"""Scheduler against simulated workers: blocks, budgets, ends, deaths. Every request ends.
Rows that make room: batch rows for more urgent requests, rows of a draining worker, answers that wait for
a worker that joins.
"""

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batcher.scheduling.plan_builder import PendingPlan
from batcher.scheduling.replica import WorkerLimits
from batcher.scheduling.scheduler import CALLERS_MS, Scheduler
from batcher.scheduling.sequence import Sequence
from common.messages.plan import HeldRow, Report
from common.messages.records import pack_ids, unpack_ids
from common.messages.request import SERVICE_CLASSES, BeamParams
from tests.support.fleet.simulated_pool import Pool, ends_at, generated_id, request, sharing_request

PLACES = 16
LIMITS = WorkerLimits(max_batch_size=PLACES)


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


def test_suspects_start_one_at_a_time() -> None:
    pool = Pool(1, num_blocks=100, seed=1, eos_chance=0)
    suspects = [request(f"r{i}", 10, 50, i) for i in range(3)]
    for one in suspects:
        one.crash_count = 1
    pool.add(*suspects, request("r9", 10, 50, 9))
    pool.decide()
    worker = pool.workers["w0"]
    started = {
        worker.live[row.number].request.request_id: row.is_suspect for row in worker.rows.rows.values()
    }
    assert started == {"r0": True, "r9": False}
    pool.turn()
    pool.decide()
    assert len(pool.workers["w0"].live) == 3


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


# --- turn ---------------------------------------------------------------------------------------------------


def of_class(name: str, class_index: int, num_prompt: int = 8, new: int = 400, entry: int = 0) -> Sequence:
    gateway, class_name = "" if class_index == 2 else "g", SERVICE_CLASSES[class_index]
    return request(name, num_prompt, new, entry, gateway=gateway, class_name=class_name)


def batch_pool(class_index: int = 2, num_blocks: int = 2000, turns: int = 8) -> Pool:
    """A full worker whose rows have progressed, and as many requests that wait."""
    pool = Pool(1, num_blocks, seed=1, limits=LIMITS, eos_chance=0, shares=False)
    pool.add(*(of_class(f"b{i}", class_index, entry=i) for i in range(2 * PLACES)))
    for _ in range(turns):
        pool.turn()
    return pool


def test_urgent_requests_take_the_places_of_all_batch_rows_at_the_same_step_boundary() -> None:
    pool = batch_pool()
    worker = pool.workers["w0"]
    for number in range(PLACES):
        name = f"u{number}"
        pool.add(of_class(name, number % 2, entry=100 + number))
        before = worker.rows.step
        pool.decide()
        worker.run()
        assert worker.rows.step == before + 1 and worker.committed[name] == 1
        worker.release()
        pool.scheduler.apply_report("w0", worker.take_report())
    pool.run()
    assert len(pool.finished) == 3 * PLACES
    pool.check_blocks_returned()


@pytest.mark.parametrize(
    ("class_index", "turns"), [(1, 8), (2, 1)], ids=["other classes", "no block of progress"]
)
def test_no_other_row_stops_for_it(class_index: int, turns: int) -> None:
    pool = batch_pool(class_index, turns=turns)
    pool.add(of_class("u", 0, entry=100))
    pool.decide()
    assert not any(row.stopping for row in pool.scheduler.replicas["w0"].running)


def test_a_batch_row_whose_class_has_waited_stays() -> None:
    """Where the urgent never cease, the batch would get a block of each stay, and new ones of it no token."""
    pool = batch_pool()
    for row in pool.scheduler.replicas["w0"].running:
        row.sequence.stays = True
    pool.add(of_class("u", 0, entry=100))
    pool.decide()
    assert not any(row.stopping for row in pool.scheduler.replicas["w0"].running)
    flooded = Pool(1, 2000, seed=1, limits=LIMITS, eos_chance=0, shares=False)
    flooded.add(
        *(of_class(f"u{i}", 0, entry=i) for i in range(60)),
        *(of_class(f"b{i}", 2, entry=100 + i) for i in range(4)),
    )
    flooded.run()
    assert all(flooded.attempts[f"b{i}"] <= 2 for i in range(4))


def test_a_place_that_is_made_for_a_request_is_not_taken_by_those_behind_it() -> None:
    """Choices of one answer may not stand by, so that it waits until the place is free."""
    pool = batch_pool()
    choice = sharing_request("c", [*range(40)], 20, 100, num_choices=2)
    choice.class_index = 0
    pool.add(choice)
    for i in range(3):
        later = of_class(f"u{i}", 0, entry=200 + i)
        pool.add(later)
        pool.turn()
        assert later.row or later.attempt, "whoever may stand by takes another place meanwhile"
    assert not choice.waiting
    pool.run()
    pool.check_blocks_returned()


def test_batch_rows_give_their_blocks_one_after_the_other() -> None:
    """Not more of them than it needs, though it waits for their release."""
    pool = batch_pool(num_blocks=PLACES * 8)
    replica = pool.scheduler.replicas["w0"]
    while replica.num_running == PLACES + 1:
        pool.turn()
    urgent = of_class("u", 0, num_prompt=160, new=8, entry=100)
    pool.add(urgent)
    num_stopped = 0
    while urgent.waiting:
        pool.decide()
        num_stopped += any(row.stopping for row in replica.running)
        assert sum(bool(row.stopping) for row in replica.running) <= 1
        pool.turn()
    assert num_stopped and replica.num_running > 1
    pool.run()
    pool.check_blocks_returned()


def test_a_deadline_is_that_of_the_request_that_has_the_id_now() -> None:
    pool = Pool(0, num_blocks=100, seed=1)
    for ttl_ms in (1000, 5000):
        pool.scheduler.expire(1000)
        pool.add(one := request("r", 3, 4, ttl_ms=ttl_ms))
        if ttl_ms == 1000:
            pool.scheduler.forget(one)
    for now_ms, ends in ((2000, []), (6000, [("r", "expired")])):
        pool.scheduler.expire(now_ms)
        pool.decide()
        assert pool.to_finish == ends


# --- turn callers -------------------------------------------------------------------------------------------

TTL_MS = 600_000


def asked_of_class(class_name: str, name: str, entry: int) -> Sequence:
    """Make a request that is queued at 1,000 ms."""
    return request(name, 3, 64, entry, ttl_ms=TTL_MS, gateway="g", class_name=class_name)


def test_plans_bound_prompts_of_batches_for_a_minute_after_the_last_caller() -> None:
    pool = Pool(1, 1000, seed=1, eos_chance=0)
    bounds = []
    for number, now_ms in enumerate((999, 1000, 999 + CALLERS_MS, 1000 + CALLERS_MS)):
        pool.scheduler.expire(now_ms)
        pool.add(asked_of_class("batch", f"b{number}", number))
        if now_ms == 1000:
            pool.add(asked_of_class("standard", "c0", 10**5))
        bounds += [pending.plan.bulk_tokens > 0 for pending in pool.scheduler.plans()]
    assert bounds == [False, True, True, False]


# --- hand over ----------------------------------------------------------------------------------------------

PROMPT, NEW = 40, 1000


def on(pool: Pool, worker: str) -> int:
    """Return how many rows a worker has."""
    return len(pool.workers[worker].live)


def two_workers(num_rows: int, max_batch_size: int = 8, num_blocks: int = 2000, prompt: int = PROMPT) -> Pool:
    """Return a pool with rows that decode."""
    limits = WorkerLimits(max_batch_size=max_batch_size)
    pool = Pool(2, num_blocks, seed=1, limits=limits, eos_chance=0, shares=False)
    pool.add(*(request(f"r{i}", prompt, NEW, i, gateway="g") for i in range(num_rows)))
    for _ in range(5 + prompt // 64):
        pool.turn()
    return pool


def learn_pace(pool: Pool, worker: str, tokens_per_ms: float) -> None:
    times = pool.scheduler.replicas[worker].pace.times
    times.tokens, times.added_ms = 1000.0 * tokens_per_ms, 1000.0


def test_rows_go_on_where_they_are_until_another_worker_has_a_place() -> None:
    pool = two_workers(16)
    assert on(pool, "w0") == on(pool, "w1") == 8
    pool.scheduler.workers.drain("w0")
    committed = dict(pool.committed)
    for _ in range(10):
        pool.turn()
    assert on(pool, "w0") == 8, "w1 has no place"
    assert all(pool.committed[name] > committed[name] for name in committed), "all decode on"
    for sequence in [row.sequence for row in pool.scheduler.replicas["w1"].running][:3]:
        pool.scheduler.cancel(sequence.request_id, "client")
    for _ in range(20):
        pool.turn()
    assert (on(pool, "w0"), on(pool, "w1")) == (5, 8), "as many leave as places became free"
    pool.run()
    assert len(pool.finished) == 16


def test_new_requests_leave_places_to_rows_on_their_way() -> None:
    """Without that, a row that was stopped for a place that became free would wait for another end."""
    pool = two_workers(16)
    pool.scheduler.workers.drain("w0")
    pool.add(*(request(f"new{i}", 10, NEW, 100 + i, gateway="g") for i in range(4)))
    pool.turn()
    scheduler = pool.scheduler
    ended = next(scheduler.replicas["w1"].running).sequence
    scheduler.cancel(ended.request_id, "client")
    for _ in range(20):
        if not scheduler.hand_over.moves:
            pool.turn()
    [moved] = scheduler.hand_over.moves
    for _ in range(20):
        if moved.row is not None and moved.row.worker == "w1":
            break
        pool.turn()
        assert not any(pool.attempts.get(f"new{i}") for i in range(4))
    pool.run()
    assert len(pool.finished) == 20


def test_a_worker_that_joins_gets_all_rows_of_a_full_pool() -> None:
    pool = two_workers(16)
    pool.scheduler.workers.drain("w0")
    joined = pool.add_worker()
    while on(pool, "w0"):
        pool.turn()
    for _ in range(3):
        pool.turn()
    assert (on(pool, "w1"), on(pool, joined)) == (8, 8)


def test_no_more_tokens_are_on_their_way_than_the_others_compute_at_once() -> None:
    pool = two_workers(16, max_batch_size=64, prompt=100)
    pool.scheduler.workers.drain("w0")
    learn_pace(pool, "w1", tokens_per_ms=4.0)  # 600 tokens at once
    seen = 0
    while on(pool, "w0"):
        pool.turn()
        learn_pace(pool, "w1", tokens_per_ms=4.0)
        moves = pool.scheduler.hand_over.moves
        seen = max(seen, len(moves))
        assert len(moves) == 1 or sum(kv_len for _, kv_len in moves.values()) <= 600
    assert seen > 1
    pool.run()
    assert len(pool.finished) == 16


def test_a_row_longer_than_what_is_computed_at_once_leaves_alone() -> None:
    pool = two_workers(4, prompt=600)
    pool.scheduler.workers.drain("w0")
    for _ in range(40):
        learn_pace(pool, "w1", tokens_per_ms=0.01)
        pool.turn()
        assert len(pool.scheduler.hand_over.moves) <= 1
    assert (on(pool, "w0"), on(pool, "w1")) == (0, 4)


def test_the_shortest_rows_leave_first_and_beam_searches_last() -> None:
    pool = Pool(1, num_blocks=2000, seed=1, eos_chance=0)
    search = request("beams", 10, NEW, 3, beams=BeamParams(2))
    pool.add(search, request("long", 500, NEW, 0), request("short", 20, NEW, 2))
    for _ in range(15):
        pool.turn()
    pool.add_worker()
    pool.scheduler.workers.drain("w0")
    due = [row.sequence.request_id for row, _ in pool.scheduler.hand_over.due()]
    assert due == ["short", "long", "beams"]


def test_rows_do_not_leave_for_a_worker_without_blocks() -> None:
    pool = two_workers(2, num_blocks=130, prompt=1000)
    assert on(pool, "w0") == on(pool, "w1") == 1
    pool.scheduler.workers.drain("w0")
    for _ in range(10):
        pool.turn()
        assert not pool.scheduler.hand_over.moves
    assert on(pool, "w0") == 1
    pool.scheduler.cancel(next(pool.scheduler.replicas["w1"].running).sequence.request_id, "client")
    pool.run()
    assert (len(pool.finished), pool.workers["w0"].live) == (2, {})


def test_a_request_that_ends_on_its_way_is_forgotten() -> None:
    pool = two_workers(4)
    pool.scheduler.workers.drain("w0")
    learn_pace(pool, "w1", tokens_per_ms=4.0)
    pool.scheduler.hand_over.stop_rows(pool.scheduler.sequences)
    assert len(pool.scheduler.hand_over.moves) == 2
    for name in list(pool.scheduler.sequences):
        pool.scheduler.cancel(name, "client")
    pool.run()
    pool.turn()
    assert not pool.scheduler.hand_over.moves


# --- turn rebalance -----------------------------------------------------------------------------------------

NUM_REQUESTS, NUM_PROMPT, NUM_NEW = 12, 400, 40


def pool_after_a_death(num_committed: int) -> Pool:
    """All rows of two workers are on the one that is left, and none is computed again yet."""
    pool = Pool(2, num_blocks=1000, seed=3, limits=WorkerLimits(max_batch_size=32), eos_chance=0.0)
    pool.add(*(request(f"r{i}", NUM_PROMPT + i, NUM_NEW, i) for i in range(NUM_REQUESTS)))
    pool.committed = dict.fromkeys((f"r{i}" for i in range(NUM_REQUESTS)), num_committed)
    pool.decide()
    for name in ("w0", "w1"):
        pool.kill(name)
    pool.add_worker()
    pool.decide()
    assert rows(pool) == {"w2": NUM_REQUESTS}
    return pool


def rows(pool: Pool) -> dict[str, int]:
    return {name: replica.num_running for name, replica in pool.scheduler.replicas.items()}


def test_a_worker_that_joins_gets_its_share_of_the_interrupted_answers_that_wait() -> None:
    pool = pool_after_a_death(num_committed=5)
    longest = {f"r{i}" for i in range(NUM_REQUESTS // 2, NUM_REQUESTS)}
    pool.add_worker()
    pool.decide()
    stopped = [row.sequence.request_id for row in pool.scheduler.replicas["w2"].running if row.stopping]
    assert {*stopped} == longest, "they would be computed last"
    for _ in range(3):
        pool.turn()
    assert rows(pool) == {"w2": NUM_REQUESTS // 2, "w3": NUM_REQUESTS // 2}
    pool.run()
    assert len(pool.finished) == NUM_REQUESTS
    pool.check_blocks_returned()


def test_requests_whose_answers_have_not_begun_stay_where_they_are() -> None:
    pool = pool_after_a_death(num_committed=0)
    pool.add_worker()
    pool.decide()
    assert not any(row.stopping for row in pool.scheduler.replicas["w2"].running)
