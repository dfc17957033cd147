"""An engine of several ranks: rank 0 in this process, where a Player can drive it, the others in processes of
their own.

`python -m tests.support.engine.multi_rank_engine RANK WORLD_SIZE PORT NUM_STAGES` is one of the others: it
takes part in one engine after the other.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from common.process.parent_death import die_with_parent
from common.rank import LOOPBACK, RankInfo, free_port
from common.settings.settings import SettingError, Settings
from gpu_worker.engine.engine import Engine
from gpu_worker.engine.loop import run_follower
from gpu_worker.engine.parallel.communicator import Communicator
from gpu_worker.engine.pipeline import PipelineEngine
from gpu_worker.protocol import Grant, StepResult
from tests.support.forks.client import ForkedProcess

OVER = Grant(-1, 0)


class Over(Exception):
    """Raised when an engine is not needed any more."""


class Follower(Communicator):
    def receive_grants(self) -> Iterator[Grant]:
        for grant in super().receive_grants():
            if grant.until < 0:
                raise Over
            yield grant


class Led:
    """Rank 0 of an engine, with the interface that Player needs."""

    def __init__(self, communicator: Communicator, **settings: Any) -> None:
        """Raises SettingError, as all ranks do."""
        dist.broadcast_object_list([settings], 0)
        self.communicator, self.grants = communicator, list[Grant]()
        self.engine = engine_class(communicator)(Settings(**settings), communicator=communicator)
        self.ready, self.rows, self.block_size = self.engine.ready, self.engine.rows, self.engine.block_size

    def apply(self, grant: Grant) -> None:
        self.grants.append(grant)

    def step(self) -> StepResult | None:
        grants, self.grants = self.grants, []
        for grant in self.communicator.broadcast_grants(grants):
            self.engine.apply(grant)
        return self.engine.step()

    def __enter__(self) -> "Led":
        return self

    def __exit__(self, *error: object) -> None:
        self.communicator.broadcast_grants([OVER])


@contextlib.contextmanager
def running(world_size: int, num_stages: int = 1) -> Iterator[Communicator]:
    """Run rank 0 of several; the others run beside it, and end with it."""
    port = free_port()
    environ = os.environ | {"PARENT_PID": str(os.getpid())}
    command = [sys.executable, "-m", "tests.support.engine.multi_rank_engine"]
    others = [
        ForkedProcess([*command, *map(str, (rank, world_size, port, num_stages))], env=environ)
        for rank in range(1, world_size)
    ]
    try:
        yield Communicator(rank_info(0, world_size, port), num_stages=num_stages)
    finally:
        for process in others:
            process.kill()
            process.wait()
        if dist.is_initialized():
            dist.destroy_process_group()


def engine_class(communicator: Communicator) -> type[Engine]:
    return PipelineEngine if communicator.num_stages > 1 else Engine


def rank_info(rank: int, world_size: int, port: int) -> RankInfo:
    return RankInfo(rank, world_size, rank, world_size, LOOPBACK, port)


def main(rank: int, world_size: int, port: int, num_stages: int) -> None:
    die_with_parent()
    communicator = Follower(rank_info(rank, world_size, port), num_stages=num_stages)
    while True:
        job: list[Any] = [None]
        dist.broadcast_object_list(job, 0)
        with contextlib.suppress(SettingError, Over):
            engine = engine_class(communicator)(Settings(**job[0]), communicator=communicator)
            run_follower(engine, communicator)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
