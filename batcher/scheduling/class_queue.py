"""ClassQueue: the requests of one service class that wait, in the order in which they start.

Resumed requests start first, the shortest first: it is back the soonest. Then the tenant that has had the
least service for its weight; of one tenant the oldest request. Service is what was computed: tokens of
prompts and generated tokens. What a row will generate is not known when it starts, so its tenant is first
charged with what its rows generate on average. When the row is released, the charge is corrected to what it
has computed.
"""

import heapq
from dataclasses import dataclass, field

from batcher.scheduling.sequence import Sequence

LOOK_PAST = 8
"""Requests that do not fit and are looked past, in one turn."""
FIRST_OUTPUT = 128.0
"""Tokens that a tenant's requests are taken to generate before one has ended."""
MEMORY = 0.9
"""Share of the former average in the new one."""
MANY_ACCOUNTS = 256


@dataclass(slots=True, eq=False)
class Account:
    """What one tenant has had of one class.

    Attributes:
        served: tokens that it is charged with, divided by its weight.
        mean_output: what its requests generate on average, in tokens.
        num_started: rows that are not released.
        waiting: a heap of (arrival, request).
        place: number of its item in `ClassQueue.order`; 0 for none. Its items with other numbers are stale.
    """

    weight: float
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


class ClassQueue:
    """Requests of one class.

    Attributes:
        resumed: a heap of (tokens to compute, arrival, request).
        accounts: by tenant; those that are worth remembering.
        order: a heap of (served, arrival of the oldest request, place, account), stale items among them.
        level: `served` of the tenant whose request started last. A tenant that begins to wait has at least
            that, so nobody saves service up while it asks for none.
        num_passed: starts of other classes since one of this class, counted while one of this class waits.
        looked_past: requests of this turn that do not fit.
        skipped: requests of this turn that may not start, whatever is free.
    """

    def __init__(self, weights: dict[str, float]) -> None:
        self.weights = weights
        self.resumed: list[tuple[int, int, Sequence]] = []
        self.accounts: dict[str, Account] = {}
        self.order: list[tuple[float, int, int, Account]] = []
        self.num_places = 0
        self.level = 0.0
        self.num_passed = 0
        self.looked_past: list[Sequence] = []
        self.skipped: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        """Have a new request wait behind the older ones of its tenant."""
        account = self.account(sequence)
        if account.first() is None:
            account.served = max(account.served, self.level)
        self.put(sequence, account)

    def put(self, sequence: Sequence, account: Account) -> None:
        heapq.heappush(account.waiting, (sequence.arrival, sequence))
        self.enqueue_account(account)

    def add_resumed(self, sequence: Sequence) -> None:
        heapq.heappush(self.resumed, (sequence.num_known, sequence.arrival, sequence))

    def account(self, sequence: Sequence) -> Account:
        tenant = sequence.request.tenant
        if (account := self.accounts.get(tenant)) is None:
            account = self.accounts[tenant] = Account(self.weights.get(tenant, 1.0), self.level)
            if len(self.accounts) > MANY_ACCOUNTS and len(self.accounts) % MANY_ACCOUNTS == 1:
                self.forget_idle(account)
        return account

    def forget_idle(self, besides: Account) -> None:
        """Forget tenants without requests that would begin at `level` anyway."""
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
        """The request that starts next, of those that this turn has not looked past."""
        if len(self.looked_past) >= LOOK_PAST:
            return None
        while self.resumed and not self.resumed[0][2].waiting:
            heapq.heappop(self.resumed)
        if self.resumed:
            return self.resumed[0][2]
        while self.order:
            _, _, place, account = self.order[0]
            if place == account.place and (first := account.first()) is not None:
                return first
            heapq.heappop(self.order)
        return None

    def remove_first(self, sequence: Sequence) -> None:
        """Remove the request that `first` returned."""
        if self.resumed and self.resumed[0][2] is sequence:
            heapq.heappop(self.resumed)
            return
        account = self.order[0][3]
        heapq.heappop(account.waiting)
        self.enqueue_account(account)

    def charge(self, sequence: Sequence, num_prefill: int) -> int:
        """Charge a request that starts to its tenant: `num_prefill` tokens, which it computes first, and what
        it generates on average. Return the number of tokens charged.
        """
        account = self.account(sequence)
        if not sequence.resumed:
            self.level = account.served
        left = sequence.request.stopping.max_new_tokens - sequence.base
        charged = num_prefill + min(left, round(account.mean_output))
        account.num_started += 1
        account.served += charged / account.weight
        self.enqueue_account(account)
        return charged

    def correct_charge(self, sequence: Sequence, charged: int, num_computed: int) -> None:
        """Correct the charge of a row that computes no more to what it has computed."""
        account = self.account(sequence)
        account.num_started -= 1
        account.served += (num_computed - charged) / account.weight
        self.enqueue_account(account)

    def learn(self, sequence: Sequence, num_generated: int) -> None:
        """Update what the tenant's rows generate on average by one that has ended."""
        account = self.account(sequence)
        account.mean_output = MEMORY * account.mean_output + (1 - MEMORY) * num_generated

    def end_turn(self) -> None:
        """Put back what this turn has looked past or skipped, where it stood."""
        for sequence in (*self.looked_past, *self.skipped):
            if sequence.resumed:
                self.add_resumed(sequence)
            else:
                self.put(sequence, self.account(sequence))
        self.looked_past.clear()
        self.skipped.clear()
