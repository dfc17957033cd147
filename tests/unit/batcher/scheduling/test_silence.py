"""Silence: who owes what, and for how long it has not been heard."""

from batcher.scheduling.replica import Replica, WorkerLimits
from batcher.scheduling.silence import Silence
from tests.support.broker_state import make_capacity

REPORTS, PLANS = ("w1", "reports"), ("w1", "plans")


def test_a_worker_is_silent_while_nothing_new_is_heard_of_one_of_its_debts() -> None:
    silence = Silence()
    silence.look({REPORTS: 3, PLANS: 7, ("w2", "takeover"): 0}, 100.0)
    silence.look({REPORTS: 4, PLANS: 7}, 105.0)
    assert silence.workers(5, 105.0) == {"w1"}, "its reports show no newer plan; w2 owes nothing any more"
    silence.look({REPORTS: 4, PLANS: 8}, 106.0)
    assert silence.workers(5, 109.9) == set()
    silence.look({REPORTS: 4}, 110.0)
    assert silence.workers(5, 110.0) == {"w1"}
    silence.look({}, 110.0)  # as after a pause: the machine was stopped, the broker was away
    silence.look({REPORTS: 4}, 200.0)
    assert silence.workers(5, 200.0) == set()


def test_a_worker_owes_reports_while_it_has_rows_and_plans_that_they_do_not_show() -> None:
    replica = Replica(make_capacity("w1"), WorkerLimits())
    replica.acknowledged, replica.plan_seen, replica.plan_written = 9, 2, 4
    assert replica.debts == {}, "without rows it reports nothing"
    replica.leaving[1] = [5]
    assert replica.debts == {"reports": 9, "plans": 2}
    replica.plan_seen = 4
    assert replica.debts == {"reports": 9}
