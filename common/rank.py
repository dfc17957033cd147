"""Rank: which of the processes that run one model together a process is, by the variables of torchrun, MPI or
Slurm, or by the settings NNODES and NODE_RANK.
"""

import re
import socket
from collections.abc import Mapping
from dataclasses import astuple, dataclass

from common.settings.settings import SettingError, Settings

LOOPBACK = "127.0.0.1"
DEFAULT_PORT = 29_500
"""Of torch, and of MASTER_PORT."""
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Torchrun's variables, in the order of the fields of RankInfo."""
OPEN_MPI = tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
PMI = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
"""Of MPICH and Intel MPI."""
SLURM = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")
"""Of `srun`; a batch script has no SLURM_STEP_NUM_TASKS."""
LAUNCHERS = (VARIABLES[:4], OPEN_MPI, PMI, SLURM)


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
        """Read the variables of what has started this process; the only rank if nothing has. Raises
        SettingError if some of them are missing.
        """
        names = launcher_of(environ)
        return cls.read_launched(environ, names) if names else cls()

    @classmethod
    def read_launched(cls, environ: Mapping[str, str], names: tuple[str, ...]) -> "RankInfo":
        """`names`: of a launcher's variables. Without those of the machine there is one rank on each machine,
        unless all meet at loopback. Raises SettingError.
        """
        address = environ.get("MASTER_ADDR", "")
        if not address and names is SLURM:
            address = first_host(environ.get("SLURM_STEP_NODELIST", ""))
        try:
            rank, world_size = int(environ[names[0]]), int(environ[names[1]])
            port = int(environ.get("MASTER_PORT") or DEFAULT_PORT)
            alone = (rank, world_size) if address == LOOPBACK else (0, 1)
            local_rank = int(environ.get(names[2], alone[0]))
            tasks = environ.get(names[3], str(alone[1]))
            local_world_size = tasks_of_node(tasks, int(environ.get("SLURM_NODEID", 0)))
        except (KeyError, ValueError) as error:
            raise SettingError(names[0], f"{' and '.join(names[:2])} belong together: {error}") from error
        if not 0 <= rank < world_size or not 0 <= local_rank < local_world_size:
            cause = (
                f"{rank} of {world_size} and {local_rank} of {local_world_size} of this machine: no such rank"
            )
            raise SettingError(names[0], cause)
        if not address and local_world_size < world_size:
            raise SettingError(
                "master_addr",
                "is missing: ranks on several machines need the address of rank 0's machine"
                " (mpirun -x MASTER_ADDR=HOST)",
            )
        return cls(rank, world_size, local_rank, local_world_size, address or LOOPBACK, port)

    @property
    def is_local(self) -> bool:
        """Whether all ranks are on this machine."""
        return self.local_world_size == self.world_size

    def environ(self) -> dict[str, str]:
        """The variables that `read` takes; none of the only rank."""
        return {} if self.world_size == 1 else dict(zip(VARIABLES, map(str, astuple(self)), strict=True))


def launcher_of(environ: Mapping[str, str]) -> tuple[str, ...] | None:
    """The variables of what has started this process as one of several ranks; None if nothing has."""
    return next((names for names in LAUNCHERS if environ.get(names[1], "1") not in ("", "1")), None)


def first_host(nodes: str) -> str:
    """The first of Slurm's list of hosts, such as `node[03-05,08],gpu1`; empty if there is none."""
    match = re.match(r"([^,\[]*)(?:\[(\d+)[^]]*\]([^,]*))?", nodes)
    return "".join(part or "" for part in match.groups()) if match else ""


def tasks_of_node(tasks: str, node: int) -> int:
    """The number of tasks on a node, of Slurm's list for all nodes, such as `4(x2),1`. Raises ValueError."""
    for entry in tasks.split(","):
        count, _, times = entry.rstrip(")").partition("(x")
        node -= int(times or 1)
        if node < 0:
            return int(count)
    raise ValueError(f"{tasks!r} has no node {node}")


def follows(settings: Settings, environ: Mapping[str, str]) -> bool:
    """Whether this machine, or the process that a launcher started, has none but ranks above 0 of its
    worker. Raises SettingError.
    """
    return RankInfo.read(environ).rank > 0 or (settings.nnodes > 1 and settings.node_rank > 0)


def is_spread(settings: Settings, environ: Mapping[str, str]) -> bool:
    """Whether other processes than this one start ranks of the same worker. Raises SettingError."""
    return RankInfo.read(environ).world_size > 1 or settings.nnodes > 1


def machine_ranks(settings: Settings, num_ranks: int) -> list[RankInfo]:
    """Return the ranks on this machine, of all ranks of a worker; each of NNODES machines has as many. Raises
    SettingError.
    """
    if num_ranks == settings.nnodes == 1:
        return [RankInfo()]
    size, rest = divmod(num_ranks, settings.nnodes)
    if rest:
        cause = f"{num_ranks} ranks are not the same number on each of {settings.nnodes} machines (NNODES)"
        raise SettingError("num_shard", f"{cause}; torchrun and mpirun start them one by one")
    first, address, port = settings.node_rank * size, settings.master_addr, settings.master_port
    if settings.nnodes == 1:
        first, address, port = 0, LOOPBACK, free_port()
    elif settings.node_rank >= settings.nnodes:
        raise SettingError(
            "node_rank", f"{settings.node_rank} is not one of {settings.nnodes} (NNODES), counted from 0"
        )
    elif not address:
        raise SettingError("master_addr", "is missing: with NNODES it is the address of machine 0")
    return [RankInfo(first + i, num_ranks, i, size, address, port) for i in range(size)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])
