"""Workers on CPU inherit memory for the weights that they share, and nobody else does."""

import os
import sys
from typing import Any

import pytest

from common.process.launch import WEIGHTS_VARIABLE
from common.settings.settings import Settings
from deploy.launcher.fleet import new_fleet, sharing_weights

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory without a name is Linux's")


@pytest.mark.parametrize(("device", "shares"), [("cpu", True), ("cuda", False)])
def test_workers_on_cpu_inherit_the_same_memory(device: Any, shares: bool) -> None:
    fleet = new_fleet(Settings(device=device, num_workers=2, redis_url="redis://localhost"), None)
    with sharing_weights(fleet):
        workers: list[Any] = [*fleet.workers, *(one for one in fleet.preloaded if one.kind == "worker")]
        handles = {one.environ.get(WEIGHTS_VARIABLE) for one in workers}
        assert len(workers) == 3 and len(handles) == 1 and (handles != {None}) == shares
        assert not any(WEIGHTS_VARIABLE in one.environ for one in [*fleet.gateways, *fleet.batchers])
    for handle in handles - {None}:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(int(handle or -1))
