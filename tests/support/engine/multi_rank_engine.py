"""An engine of several ranks: rank 0 in this process, where a Player can drive it, the others in processes of
their own.

`python -m tests.support.engine.multi_rank_engine RANK WORLD_SIZE PORT NUM_STAGES` is one of the others: it
takes part in one engine after the other.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from common.messages.plan import Plan
from common.process.launch import die_with_parent
from common.rank import LOOPBACK, RankInfo, free_port
from common.settings.settings import SettingError, Settings
from gpu_worker.engine.engine import Engine
from gpu_worker.engine.loop import run_follower
from gpu_worker.engine.parallel.communicator import Communicator
from gpu_worker.protocol import AdapterAnswer, Command, StepResult
from tests.support.engine import tiny_engine, tiny_models
from tests.support.engine.batch_player import player
from tests.support.engine.row_steps import plan
from tests.support.engine.tiny_engine import NEW_TOKENS, SETTINGS, answers, prompts
from tests.support.forks.client import ForkedProcess

OVER = plan(-1, 0)


class Over(Exception):
    """Raised when an engine is not needed any more."""


class Follower(Communicator):
    def receive_commands(self) -> Iterator[Command]:
        for command in super().receive_commands():
            if command == OVER:
                raise Over
            yield command


class Led:
    """Rank 0 of an engine, with the interface that Player needs."""

    def __init__(self, communicator: Communicator, **settings: Any) -> None:
        """Raises SettingError, as all ranks do."""
        dist.broadcast_object_list([settings], 0)
        self.communicator, self.grants = communicator, list[Plan]()
        self.engine = Engine(Settings(**settings), communicator=communicator)
        self.ready, self.rows, self.block_size = self.engine.ready, self.engine.rows, self.engine.block_size

    def apply(self, grant: Plan) -> None:
        self.grants.append(grant)

    def obey(self, command: Command) -> AdapterAnswer | None:
        self.communicator.broadcast_commands([command])
        return self.engine.obey(command)

    def step(self) -> StepResult | None:
        grants, self.grants = self.grants, []
        for command in self.communicator.broadcast_commands(grants):
            self.engine.obey(command)
        return self.engine.step()

    def __enter__(self) -> "Led":
        return self

    def __exit__(self, *error: object) -> None:
        self.communicator.broadcast_commands([OVER])


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


def rank_info(rank: int, world_size: int, port: int) -> RankInfo:
    return RankInfo(rank, world_size, rank, world_size, LOOPBACK, port)


def play_behind(engine: Any, fresh: dict[int, list[int]]) -> dict[int, list[int]]:
    """All ids of rows behind nine tokens, in blocks that others have filled with prompts and tokens."""
    played = player(engine)
    played.kept = set(played.free)
    played.run([played.start(row, ids, 9, ignore_eos=True) for row, ids in fresh.items()])
    ids = played.run(played.start_resumed(list(fresh), NEW_TOKENS, base=9, by=100))
    return {row: ids[100 + row] for row in fresh}


def check_ids(ranks: Communicator, family: tuple[str, dict[str, Any]], folder: Path) -> None:
    """The ids of a tiny model of the family are those of transformers' `generate`, also in blocks that others
    have filled.
    """
    model = tiny_models.save(folder, *family)
    fresh = dict(enumerate(prompts(model.config.get_text_config().vocab_size)))
    expected = answers(model, fresh)
    with Led(ranks, model_id=str(folder), **SETTINGS) as engine:
        assert engine.ready.world_size == ranks.world_size
        tiny_engine.check_ids(engine, expected, fresh)
        if engine.ready.prefix_caching:
            behind = play_behind(engine, fresh)
            assert behind == {row: ids[9:] for row, ids in expected.items()}, "behind blocks of others"


def main(rank: int, world_size: int, port: int, num_stages: int) -> None:
    die_with_parent()
    communicator = Follower(rank_info(rank, world_size, port), num_stages=num_stages)
    while True:
        job: list[Any] = [None]
        dist.broadcast_object_list(job, 0)
        with contextlib.suppress(SettingError, Over):
            engine = Engine(Settings(**job[0]), communicator=communicator)
            run_follower(engine, communicator)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
