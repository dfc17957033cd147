"""Rank info: which of the processes that run one model together this process is, by torchrun's variables."""

import socket
from collections.abc import Mapping
from dataclasses import astuple, dataclass

from common.settings.settings import SettingError

LOOPBACK = "127.0.0.1"
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Torchrun's variables, in the order of the fields of RankInfo."""


@dataclass(frozen=True, slots=True)
class RankInfo:
    """One of the processes that run one model together.

    Attributes:
        rank, world_size: of all ranks of the worker; rank 0 is connected to the agent.
        local_rank, local_world_size: of those on this machine.
        address, port: where rank 0 listens until all ranks are connected.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    address: str = ""
    port: int = 0

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> "RankInfo":
        """Read torchrun's variables. Raises SettingError if some of them are missing."""
        if environ.get("WORLD_SIZE", "1") in ("", "1"):
            return cls()
        try:
            rank, world_size, port = (int(environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
            local_rank, local_world_size = (
                int(environ.get("LOCAL_RANK", rank)),
                int(environ.get("LOCAL_WORLD_SIZE", world_size)),
            )
            return cls(rank, world_size, local_rank, local_world_size, environ["MASTER_ADDR"], port)
        except (KeyError, ValueError) as error:
            raise SettingError(
                "rank", f"RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT belong together: {error}"
            ) from error

    def environ(self) -> dict[str, str]:
        """The variables that `read` takes."""
        return dict(zip(VARIABLES, map(str, astuple(self)), strict=True))


def local_ranks(num_ranks: int) -> list[RankInfo]:
    """Return the ranks of a model that all run on this machine."""
    if num_ranks == 1:
        return [RankInfo()]
    port = free_port()
    return [RankInfo(rank, num_ranks, rank, num_ranks, LOOPBACK, port) for rank in range(num_ranks)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])
