"""Loading: the threads that a worker takes of its machine's cores."""

import pytest

from common.process import machine
from common.rank import RankInfo
from common.settings.settings import Settings
from gpu_worker.engine.model.load import threads_of
from gpu_worker.engine.parallel.communicator import Communicator


@pytest.mark.parametrize(
    ("num_workers", "ranks_of_each", "threads"), [(1, 1, 16), (3, 1, 5), (3, 2, 2), (40, 1, 1)]
)
def test_workers_and_their_ranks_divide_the_cores(
    num_workers: int, ranks_of_each: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "num_cores", lambda: 16)
    communicator = Communicator(RankInfo(local_world_size=ranks_of_each))
    assert threads_of(Settings(num_workers=num_workers), communicator) == threads
