"""Which events a gateway sends at once."""

from collections import Counter

from api.webhooks.places import BUSY_WAIT_MS, MAX_PER_RECEIVER, MAX_SENDING, choose


def test_a_receiver_has_few_places_and_the_next_one_is_served() -> None:
    receivers = ["slow"] * (MAX_SENDING + 1) + ["fast"]
    chosen = choose(receivers, Counter())
    assert chosen.sent == [*range(MAX_PER_RECEIVER), len(receivers) - 1]
    held = range(MAX_PER_RECEIVER, len(receivers) - 1)
    assert chosen.postponed == [(i, BUSY_WAIT_MS) for i in held]


def test_events_that_are_being_sent_count() -> None:
    assert choose(["one", "two"], Counter(one=MAX_PER_RECEIVER)).sent == [1]


def test_what_no_gateway_place_is_left_for_is_due_at_once() -> None:
    sending = Counter({f"host-{i}": 1 for i in range(MAX_SENDING - 1)})
    assert choose(["one", "two"], sending) == ([0], [(1, 0)])
