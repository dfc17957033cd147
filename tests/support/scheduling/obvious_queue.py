"""ObviousQueue: the order of `RequestQueue`, found by looking at every request each time."""

from dataclasses import dataclass, field

from batcher.scheduling.request_queue import (
    FIRST_OUTPUT,
    MAX_LOOKED_PAST,
    MAX_PASSED,
    OUTPUT_MEMORY,
    PATIENCE,
)
from batcher.scheduling.sequence import Sequence

Tenant = tuple[int, str]
"""(rank of a class, name of a tenant)"""


def tenant_of(sequence: Sequence) -> Tenant:
    return sequence.class_index, sequence.request.tenant


@dataclass
class ObviousQueue:
    weights: dict[str, float]
    waiting: list[Sequence] = field(default_factory=list)
    served: dict[Tenant, float] = field(default_factory=dict)
    means: dict[Tenant, float] = field(default_factory=dict)
    levels: list[float] = field(default_factory=lambda: [0.0] * 3)
    passed: list[int] = field(default_factory=lambda: [0] * 3)
    num_passed: dict[str, int] = field(default_factory=dict)
    looked_past: list[Sequence] = field(default_factory=list)

    def add(self, sequence: Sequence) -> None:
        tenant = tenant_of(sequence)
        has_new = any(tenant_of(one) == tenant and not one.resumed for one in self.waiting)
        if not sequence.resumed and not has_new:
            self.served[tenant] = max(self.served.get(tenant, 0.0), self.levels[sequence.class_index])
        self.waiting.append(sequence)

    def first_of(self, class_index: int) -> Sequence | None:
        if sum(one.class_index == class_index for one in self.looked_past) >= MAX_LOOKED_PAST:
            return None
        known = {id(one) for one in self.looked_past}
        mine = [
            one
            for one in self.waiting
            if one.class_index == class_index and one.waiting and id(one) not in known
        ]
        resumed = [one for one in mine if one.resumed]
        if resumed:
            return min(resumed, key=lambda one: (one.num_known, one.arrival))
        oldest = {
            tenant: min(one.arrival for one in mine if tenant_of(one) == tenant)
            for tenant in map(tenant_of, mine)
        }
        return min(
            mine,
            key=lambda one: (self.served.get(tenant_of(one), 0.0), oldest[tenant_of(one)], one.arrival),
            default=None,
        )

    def first(self) -> Sequence | None:
        if any(self.num_passed.get(one.request_id, 0) >= MAX_PASSED for one in self.looked_past):
            return None
        for class_index in (2, 1, 0):
            if self.passed[class_index] >= PATIENCE and (one := self.first_of(class_index)):
                return one
        for class_index in (0, 1, 2):
            if (found := self.first_of(class_index)) or any(
                one.class_index == class_index for one in self.looked_past
            ):
                return found
        return None

    def start(self, sequence: Sequence, num_prefill: int) -> int:
        tenant, class_index = tenant_of(sequence), sequence.class_index
        self.waiting.remove(sequence)
        served = self.served.get(tenant, self.levels[class_index])
        if not sequence.resumed:
            self.levels[class_index] = served
        left = sequence.request.stopping.max_new_tokens - sequence.base
        charged = num_prefill + min(left, round(self.means.get(tenant, FIRST_OUTPUT)))
        self.served[tenant] = served + charged / self.weights.get(tenant[1], 1.0)
        self.num_passed[sequence.request_id] = 0
        for other in range(3):
            waits = any(one.class_index == other and one.waiting for one in self.waiting)
            self.passed[other] = self.passed[other] + 1 if waits and other != class_index else 0
        for one in self.looked_past:
            self.num_passed[one.request_id] = self.num_passed.get(one.request_id, 0) + 1
        return charged

    def look_past(self, sequence: Sequence) -> None:
        self.looked_past.append(sequence)

    def correct_charge(self, sequence: Sequence, charged: int, num_computed: int) -> None:
        tenant = tenant_of(sequence)
        self.served[tenant] += (num_computed - charged) / self.weights.get(tenant[1], 1.0)

    def learn(self, sequence: Sequence, num_generated: int) -> None:
        mean = self.means.get(tenant_of(sequence), FIRST_OUTPUT)
        self.means[tenant_of(sequence)] = OUTPUT_MEMORY * mean + (1 - OUTPUT_MEMORY) * num_generated

    def end_turn(self) -> None:
        self.looked_past.clear()
