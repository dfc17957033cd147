"""A batcher that was told to end leaves when nobody needs it."""

import pytest

from batcher.departure import LOOKS_BEFORE_GONE, GatewayState, must_stay


@pytest.mark.parametrize(
    ("has_standby", "gateways", "stays"),
    [
        (False, [("draining", 3), ("ready", 0)], True),
        (True, [("draining", 3)], False),
        (False, [("draining", 0)], False),
        (False, [("ready", 3)], False),
        (False, [], False),
    ],
)
def test_it_stays_for_streams_of_gateways_that_end_with_it(
    has_standby: bool, gateways: list[GatewayState], stays: bool
) -> None:
    assert must_stay(has_standby, gateways, LOOKS_BEFORE_GONE) is stays


def test_at_first_it_waits_for_gateways_to_show_that_they_end() -> None:
    assert must_stay(True, [("ready", 0)], 0)
    assert not must_stay(False, [], 0)
