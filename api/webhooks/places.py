"""Places: which events a gateway sends at once. A receiver that is slow to answer has few of them, so that it
holds up no other.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

MAX_SENDING = 32
"""Events that one gateway sends at once."""
MAX_PER_RECEIVER = 4
"""Of these, to one host and port."""
BUSY_WAIT_MS = 200
"""Until an event is looked at again whose receiver had no place left. A receiver that answers at once gets
MAX_PER_RECEIVER events in that time, from each gateway.
"""


class Chosen(NamedTuple):
    """Places of events, and what becomes of them.

    Attributes:
        sent: indices of events that are sent now.
        postponed: index, and the ms after which it is due again, of the others.
    """

    sent: list[int]
    postponed: list[tuple[int, int]]


def choose(receivers: Sequence[str], sending: Counter[str]) -> Chosen:
    """Choose events in their order.

    Args:
        receivers: of the events that are due.
        sending: events that each receiver is being sent.
    """
    now, chosen = Counter(sending), Chosen([], [])
    for i, receiver in enumerate(receivers):
        if now[receiver] >= MAX_PER_RECEIVER:
            chosen.postponed.append((i, BUSY_WAIT_MS))
        elif now.total() >= MAX_SENDING:
            chosen.postponed.append((i, 0))
        else:
            now[receiver] += 1
            chosen.sent.append(i)
    return chosen
