"""Workers, batchers and gateways are killed, clients hang up: each committed token is counted once."""

from dataclasses import replace

import pytest

from deploy.launcher.embedded_broker import Broker
from tests.support.chaos.metered import MeteringPlan, run

PLAN = MeteringPlan(seed=33, kills=25)


@pytest.mark.parametrize("kills", [25, pytest.param(1000, marks=pytest.mark.slow)])
async def test_what_is_counted_is_what_is_committed(broker: Broker, kills: int) -> None:
    plan = replace(PLAN, kills=kills)
    outcome = await run(plan, broker.url)
    assert outcome.kills.total() == kills and sum(used.generated for used in outcome.committed.values()) > 100
    assert outcome.drift == 0, (outcome.counted, outcome.committed)
    assert outcome.wrong == [] and outcome.pending == {}
    assert outcome.spent <= plan.budget + plan.num_clients, "one token of each row"
