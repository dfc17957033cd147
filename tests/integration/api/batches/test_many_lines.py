"""A batch of many lines, whose processes are killed again and again, has each line once."""

import os
from pathlib import Path

import pytest

from deploy.launcher.embedded_broker import Broker
from tests.support.batches.killed_batch import BatchPlan, run

PLAN = BatchPlan(
    lines=int(os.environ.get("BATCH_LINES", "2000")), kills=int(os.environ.get("BATCH_KILLS", "12"))
)
MAX_GATEWAY_MIB = 400


@pytest.mark.slow
@pytest.mark.timeout(3000)
async def test_each_line_is_once_in_the_output_whatever_is_killed(broker: Broker, tmp_path: Path) -> None:
    """The output is that of the undisturbed batch. BATCH_LINES=50000 BATCH_KILLS=100 is the full size."""
    outcome = await run(PLAN, broker, tmp_path)
    assert not outcome.wrong
    assert outcome.kills.total() >= PLAN.kills // 2
    assert max(outcome.largest_mib) < MAX_GATEWAY_MIB
    print(
        f"{PLAN.lines} lines; kills {dict(outcome.kills)}; {outcome.took_s} s; gateways of "
        f"{outcome.largest_mib[0]} to {max(outcome.largest_mib)} MiB; output {outcome.digest}"
    )
