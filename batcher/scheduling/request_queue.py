"""RequestQueue: all requests that wait, and which of them starts next. It knows neither clock nor workers.

A class starts before the less urgent ones. None starves: a class that waits starts a request after PATIENCE
starts of others, and a request that does not fit is looked past for MAX_PASSED starts; then nothing starts
before it.
"""

from collections.abc import Mapping

from batcher.scheduling.class_queue import ClassQueue
from batcher.scheduling.sequence import PlacedRow, Sequence
from common.messages.service_class import SERVICE_CLASSES

PATIENCE = 16
"""Starts of other classes for which a class waits."""
MAX_PASSED = 64
"""Starts of other requests for which one waits that does not fit."""


class RequestQueue:
    """A turn is: ask for the `first`, then `start` it, `look_past` it (it does not fit) or `skip` it (it may
    not start now), and so on until there is none; then `end_turn`.

    Attributes:
        classes: the most urgent first.
        stopped: whether nothing more starts in this turn: a request that waits for room has been passed by
            enough others.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self.classes = [ClassQueue(dict(weights)) for _ in SERVICE_CLASSES]
        self.stopped = False

    def add(self, sequence: Sequence) -> None:
        """Have a request wait. One that is resumed waits before all new ones of its class."""
        queue = self.classes[sequence.class_index]
        if sequence.resumed:
            queue.add_resumed(sequence)
        else:
            queue.add(sequence)

    def first(self) -> Sequence | None:
        """The request that starts next; None if no other can start in this turn."""
        if self.stopped:
            return None
        due = [queue for queue in reversed(self.classes) if queue.num_passed >= PATIENCE]
        for queue in due:
            if (sequence := queue.first()) is not None:
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
        """The first request does not fit; others of its class may start before it."""
        queue = self.classes[sequence.class_index]
        queue.remove_first(sequence)
        queue.looked_past.append(sequence)
        self.stopped = sequence.num_passed >= MAX_PASSED

    def set_aside(self, sequence: Sequence) -> None:
        """The first request waits for something else, and is added again when that has come."""
        self.classes[sequence.class_index].remove_first(sequence)

    def skip(self, sequence: Sequence) -> None:
        """The first request may not start now; nobody waits for it."""
        queue = self.classes[sequence.class_index]
        queue.remove_first(sequence)
        queue.skipped.append(sequence)

    def correct_charge(self, row: PlacedRow, kv_len: int) -> None:
        """A row computes no more, and held `kv_len` tokens. One that was adopted was charged to nobody."""
        if row.charged is not None:
            num_computed = max(0, kv_len - row.num_cached)
            self.classes[row.sequence.class_index].correct_charge(row.sequence, row.charged, num_computed)
            row.charged = None

    def learn(self, sequence: Sequence, num_generated: int) -> None:
        """A row has ended after so many tokens; one that never ran says nothing of others."""
        if num_generated > 0:
            self.classes[sequence.class_index].learn(sequence, num_generated)

    def end_turn(self) -> None:
        self.stopped = False
        for queue in self.classes:
            queue.end_turn()
