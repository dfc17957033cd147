"""Request queue: all requests that wait, and which of them starts next. It knows neither clock nor workers.

A class starts before the less urgent ones. None starves: a class that waits starts a request after PATIENCE
starts of others, and a request that does not fit is looked past for MAX_PASSED starts; then nothing starts
before it.
"""

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field

from batcher.scheduling.sequence import PlacedRow, Sequence
from common.messages.request import SERVICE_CLASSES

PATIENCE = 16
"""Starts of other classes for which a class waits."""
MAX_PASSED = 64
"""Starts of other requests for which a request waits that does not fit."""
MAX_LOOKED_PAST = 8
"""Requests of a class that are looked past in one turn."""
FIRST_OUTPUT = 128.0
"""Tokens that a tenant's requests are taken to generate before one has ended."""
OUTPUT_MEMORY = 0.9
"""Share of the former average in the new one."""
MANY_ACCOUNTS = 256
"""Each time that many more tenants are known, idle ones are forgotten."""


@dataclass(slots=True, eq=False)
class Account:
    """Service of one tenant in one class.

    Attributes:
        served: tokens that it is charged with, each request's divided by the weight that came with it.
        mean_output: what its requests generate on average, in tokens.
        num_started: rows that are not released.
        waiting: a heap of (arrival, request).
        place: number of its item in `ClassQueue.order`; 0 for none. Its items with other numbers are stale.
    """

    served: float
    mean_output: float = FIRST_OUTPUT
    num_started: int = 0
    waiting: list[tuple[int, Sequence]] = field(default_factory=list)
    place: int = 0

    def first(self) -> Sequence | None:
        """Return the tenant's oldest request that waits."""
        while self.waiting and not self.waiting[0][1].waiting:
            heapq.heappop(self.waiting)
        return self.waiting[0][1] if self.waiting else None


@dataclass(eq=False)
class ClassQueue:
    """The requests of one class that wait, in the order in which they start.

    Resumed requests start first: of those under which the fewest workers died the shortest, which is back the
    soonest. So deaths that have another cause do not meet one suspect again and again. Then comes the tenant
    that has had the least service for its weight, with its oldest request. Service is prompt tokens computed
    and tokens generated; what a tenant is charged with at the start, by what its rows generate on average, is
    corrected when the row is released.

    Attributes:
        resumed: a heap of (crash count, tokens to compute, arrival, request).
        accounts: by tenant; those that are worth remembering.
        order: a heap of (served, arrival of the oldest request, place, account), stale items among them.
        level: `served` of the tenant whose request started last. A tenant that begins to wait is raised to
            it, so no tenant saves up service while it asks for none.
        num_passed: starts of other classes since one of this class, counted while one of this class waits.
        looked_past: requests of this turn that do not fit.
        skipped: requests of this turn that may not start now, even where there is room.
    """

    weights: dict[str, float]
    resumed: list[tuple[int, int, int, Sequence]] = field(default_factory=list)
    accounts: dict[str, Account] = field(default_factory=dict)
    order: list[tuple[float, int, int, Account]] = field(default_factory=list)
    num_places: int = 0
    level: float = 0.0
    num_passed: int = 0
    looked_past: list[Sequence] = field(default_factory=list)
    skipped: list[Sequence] = field(default_factory=list)

    def add(self, sequence: Sequence) -> None:
        """Have a request wait: a new one after the older ones of its tenant, a resumed one before all new."""
        if not sequence.resumed and (account := self.account(sequence)).first() is None:
            account.served = max(account.served, self.level)
        self.put(sequence)

    def put(self, sequence: Sequence) -> None:
        if sequence.resumed:
            rank = sequence.crash_count, sequence.num_known, sequence.arrival
            heapq.heappush(self.resumed, (*rank, sequence))
            return
        account = self.account(sequence)
        heapq.heappush(account.waiting, (sequence.arrival, sequence))
        self.enqueue_account(account)

    def account(self, sequence: Sequence) -> Account:
        tenant = sequence.request.tenant
        if (account := self.accounts.get(tenant)) is None:
            account = self.accounts[tenant] = Account(self.level)
            if len(self.accounts) > MANY_ACCOUNTS and len(self.accounts) % MANY_ACCOUNTS == 1:
                self.forget_idle(account)
        return account

    def weight(self, sequence: Sequence) -> float:
        """Return the weight of a request's tenant when it was asked."""
        request = sequence.request
        return request.weight or self.weights.get(request.tenant, 1.0)

    def forget_idle(self, besides: Account) -> None:
        """Forget tenants without requests whose service is not above `level`."""
        self.accounts = {
            tenant: account
            for tenant, account in self.accounts.items()
            if account is besides or account.waiting or account.num_started or account.served > self.level
        }

    def enqueue_account(self, account: Account) -> None:
        """Give a tenant that waits its place among the others."""
        account.place = 0
        if (first := account.first()) is None:
            return
        self.num_places += 1
        account.place = self.num_places
        heapq.heappush(self.order, (account.served, first.arrival, account.place, account))
        if len(self.order) > 4 * len(self.accounts) + 64:
            self.order = [item for item in self.order if item[3].place == item[2]]
            heapq.heapify(self.order)

    def first(self) -> Sequence | None:
        """Return the request that starts next, of those that this turn has not looked past."""
        if len(self.looked_past) >= MAX_LOOKED_PAST:
            return None
        while self.resumed and not self.resumed[0][3].waiting:
            heapq.heappop(self.resumed)
        if self.resumed:
            return self.resumed[0][3]
        while self.order:
            _, _, place, account = self.order[0]
            if place == account.place and (first := account.first()) is not None:
                return first
            heapq.heappop(self.order)
        return None

    def remove_first(self, sequence: Sequence) -> None:
        """Remove the request that `first` returned."""
        if self.resumed and self.resumed[0][3] is sequence:
            heapq.heappop(self.resumed)
            return
        account = self.order[0][3]
        heapq.heappop(account.waiting)
        self.enqueue_account(account)

    def charge(self, sequence: Sequence, num_prefill: int) -> int:
        """Charge a tenant for a request that starts: `num_prefill` tokens, which it computes first, and the
        average output. Return the number of tokens charged.
        """
        account = self.account(sequence)
        if not sequence.resumed:
            self.level = account.served
        left = sequence.num_places * sequence.request.stopping.max_new_tokens - sequence.base
        charged = num_prefill + min(left, round(account.mean_output))
        account.num_started += 1
        account.served += charged / self.weight(sequence)
        self.enqueue_account(account)
        return charged

    def end_turn(self) -> None:
        """Put the requests that this turn has looked past or skipped back in their places."""
        for sequence in (*self.looked_past, *self.skipped):
            self.put(sequence)
        self.looked_past.clear()
        self.skipped.clear()


class RequestQueue:
    """All requests that wait. In a turn the scheduler asks for the `first`, then calls `start`, `look_past`
    (it does not fit), `set_aside` or `skip` (it may not start now), until there is none; then `end_turn`.

    Attributes:
        classes: the most urgent first.
        stopped: whether nothing more starts in this turn: a request that waits for room has been passed by
            enough others.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self.classes = [ClassQueue(dict(weights)) for _ in SERVICE_CLASSES]
        self.stopped = False

    def add(self, sequence: Sequence) -> None:
        self.classes[sequence.class_index].add(sequence)

    def first(self) -> Sequence | None:
        """Return the request that starts next; None if no other can start in this turn."""
        if self.stopped:
            return None
        for queue in reversed(self.classes):
            if queue.num_passed >= PATIENCE and (sequence := queue.first()) is not None:
                return sequence
        for queue in self.classes:
            if (sequence := queue.first()) is not None:
                return sequence
            if queue.looked_past:
                return None
        return None

    def start(self, sequence: Sequence, num_prefill: int) -> int:
        """Start the first request, which computes `num_prefill` tokens before it generates. Return the number
        of tokens that its tenant is charged with.
        """
        queue = self.classes[sequence.class_index]
        queue.remove_first(sequence)
        charged = queue.charge(sequence, num_prefill)
        sequence.num_passed = 0
        sequence.stays = queue.num_passed >= PATIENCE
        for other in self.classes:
            has_waiting = bool(other.looked_past) or other.first() is not None
            other.num_passed = other.num_passed + 1 if has_waiting and other is not queue else 0
            for waiting in other.looked_past:
                waiting.num_passed += 1
        return charged

    def look_past(self, sequence: Sequence) -> None:
        """Let others of its class start before the first request, which does not fit."""
        queue = self.classes[sequence.class_index]
        queue.remove_first(sequence)
        queue.looked_past.append(sequence)
        self.stopped = sequence.num_passed >= MAX_PASSED

    def set_aside(self, sequence: Sequence) -> None:
        """Remove the first request, which waits for a row; it is added again when that row is computed."""
        self.classes[sequence.class_index].remove_first(sequence)

    def skip(self, sequence: Sequence) -> None:
        """Pass over the first request, which may not start now; no other waits for it."""
        queue = self.classes[sequence.class_index]
        queue.remove_first(sequence)
        queue.skipped.append(sequence)

    def correct_charge(self, row: PlacedRow, kv_len: int) -> None:
        """Correct the charge of a row that held `kv_len` tokens; an adopted row was never charged."""
        if row.charged is not None:
            queue = self.classes[row.sequence.class_index]
            account = queue.account(row.sequence)
            account.num_started -= 1
            surplus = max(0, kv_len - row.num_cached) - row.charged
            account.served += surplus / queue.weight(row.sequence)
            queue.enqueue_account(account)
            row.charged = None

    def learn(self, sequence: Sequence, num_generated: int) -> None:
        """Update the average output of a tenant by a row that has ended; one that generated nothing is no
        measure of others.
        """
        if num_generated > 0:
            account = self.classes[sequence.class_index].account(sequence)
            newest = (1 - OUTPUT_MEMORY) * (num_generated * sequence.num_places)
            account.mean_output = OUTPUT_MEMORY * account.mean_output + newest

    def end_turn(self) -> None:
        self.stopped = False
        for queue in self.classes:
            queue.end_turn()
