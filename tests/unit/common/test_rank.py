"""Ranks, by the variables of what starts them."""

from typing import Any

import pytest

from common.rank import RankInfo, follows, is_spread, machine_ranks
from common.settings.settings import SettingError, Settings

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
PLACE = {"MASTER_ADDR": "node0", "MASTER_PORT": "1234"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SLURM = {
    "SLURM_PROCID": "4",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NODELIST": "gpu[07-08,11]",
}


@pytest.mark.parametrize(
    ("environ", "info"),
    [
        ({}, RankInfo()),
        ({"WORLD_SIZE": "1", "RANK": "0"}, RankInfo()),
        (TORCHRUN | PLACE, RankInfo(3, 4, 1, 2, "node0", 1234)),
        (OPEN_MPI, RankInfo(1, 2, 1, 2, "127.0.0.1", 29_500)),
        (MPICH | PLACE, RankInfo(3, 4, 1, 2, "node0", 1234)),
        (SLURM, RankInfo(4, 5, 0, 1, "gpu07", 29_500)),
        (SLURM | PLACE, RankInfo(4, 5, 0, 1, "node0", 1234)),
        ({"RANK": "1", "WORLD_SIZE": "2", **PLACE}, RankInfo(1, 2, 0, 1, "node0", 1234)),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"},
            RankInfo(1, 2, 1, 2, "127.0.0.1", 29_500),
        ),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, RankInfo()),
    ],
)
def test_ranks_by_the_variables_of_their_launcher(environ: dict[str, str], info: RankInfo) -> None:
    assert RankInfo.read(environ) == info
    assert RankInfo.read(info.environ()) == info


@pytest.mark.parametrize(
    ("environ", "line"),
    [
        ({"WORLD_SIZE": "2", **PLACE}, "RANK: RANK and WORLD_SIZE belong together: 'RANK'"),
        (TORCHRUN | {"RANK": "4"} | PLACE, "RANK: 4 of 4 and 1 of 2 of this machine: no such rank"),
        (MPICH, "MASTER_ADDR: is missing: .*mpirun -x MASTER_ADDR=HOST"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "x"}, "OMPI_COMM_WORLD_RANK: .* belong together"),
    ],
)
def test_variables_that_make_no_rank_are_refused_by_name(environ: dict[str, str], line: str) -> None:
    with pytest.raises(SettingError, match=line):
        RankInfo.read(environ)


def test_the_ranks_of_one_machine_meet_at_loopback() -> None:
    ranks = machine_ranks(Settings(), 3)
    assert [(info.rank, info.local_rank, info.address) for info in ranks] == [
        (i, i, "127.0.0.1") for i in range(3)
    ]
    assert all(info.is_local for info in ranks) and machine_ranks(Settings(), 1) == [RankInfo()]


def test_each_of_several_machines_has_as_many_ranks() -> None:
    settings = Settings(nnodes=2, node_rank=1, master_addr="node0")
    assert machine_ranks(settings, 4) == [
        RankInfo(2, 4, 0, 2, "node0", 29_500),
        RankInfo(3, 4, 1, 2, "node0", 29_500),
    ]
    assert is_spread(settings, {}) and follows(settings, {})
    assert not follows(Settings(nnodes=2), {}) and not is_spread(Settings(num_shard=2), {})
    assert follows(Settings(), TORCHRUN | PLACE)


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"node_rank": 1}, "NUM_SHARD: 3 ranks are not the same number on each of 2 machines"),
        ({"nnodes": 3, "node_rank": 3}, "NODE_RANK: 3 is not one of 3 .NNODES., counted from 0"),
        ({"nnodes": 3}, "MASTER_ADDR: is missing: with NNODES it is the address of machine 0"),
    ],
)
def test_machines_that_do_not_fit_are_refused_by_name(settings: dict[str, Any], line: str) -> None:
    with pytest.raises(SettingError, match=line):
        machine_ranks(Settings(**{"nnodes": 2, **settings}), 3)
