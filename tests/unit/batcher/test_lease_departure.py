"""A batcher that was told to end leaves when nobody needs it."""

import pytest

from batcher.lease import GatewayState, HeartbeatCount, must_stay


@pytest.mark.parametrize(
    ("has_standby", "gateways", "stays"),
    [
        (False, [GatewayState("draining", 3, True), GatewayState("ready", 0, True)], True),
        (True, [GatewayState("draining", 3, True)], False),
        (False, [GatewayState("draining", 0, False)], False),
        (False, [GatewayState("ready", 3, True)], False),
        (False, [GatewayState("died", 3, False)], False),
        (False, [], False),
    ],
)
def test_it_stays_for_streams_of_gateways_that_end_with_it(
    has_standby: bool, gateways: list[GatewayState], stays: bool
) -> None:
    assert must_stay(has_standby, gateways) is stays


def test_at_first_it_waits_for_gateways_to_show_that_they_end() -> None:
    assert must_stay(True, [GatewayState("ready", 0, False)])


def test_a_process_is_believed_by_two_heartbeats_behind_the_first_look() -> None:
    count = HeartbeatCount()
    for i, last_ms in enumerate((5.0, 5.0, 6.0, 6.0, 7.0)):
        count.look({"b1": last_ms, "gone": 1.0} if i < 3 else {"b1": last_ms})
        assert count.believes("b1") is (last_ms == 7.0)
    assert not count.believes("gone")
