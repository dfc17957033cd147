"""NCCL in a world of one: sums of a rank's layers, compiled and within captured steps; by gloo on CPU. Worlds
of several GPUs: test_memory.py.
"""

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from common.rank import LOOPBACK, RankInfo, free_port
from gpu_worker.engine.cuda.graphs import CudaGraphs, make_capture
from gpu_worker.engine.engine import Engine
from gpu_worker.engine.model import passes
from gpu_worker.engine.parallel.communicator import Communicator, join_process_group
from gpu_worker.engine.parallel.model_parallel import TpPlan, connect_shards, make_tp_plan
from gpu_worker.engine.parallel.rendezvous import connect_ranks
from tests.support.engine import tiny_models
from tests.support.engine.on_cuda import (
    ANYWHERE,
    FLASH_FAMILIES,
    again,
    check_near,
    engine_on,
    needs_flash,
    noted,
)
from tests.support.engine.tiny_engine import play, prompts


@pytest.fixture
def communicator(device: str) -> Iterator[Communicator]:
    """The only rank of a process group, which joins it as one of several does."""
    if device == "cuda":
        torch.cuda.set_device(0)
    info = RankInfo(0, 1, 0, 1, LOOPBACK, free_port())
    links = connect_ranks(info)
    join_process_group(links)
    yield Communicator(info, links)
    gc.collect()  # graphs with sums end before their communicator does
    dist.destroy_process_group()


@ANYWHERE
def test_sums_are_captured(device: str, communicator: Communicator) -> None:
    """A replay sums what the tensors hold then."""
    rows, weight = torch.ones(4, 256, device=device), torch.eye(256, device=device)
    result = torch.zeros(4, 256, device=device)

    def run() -> None:
        gathered = communicator.all_gather(communicator.all_reduce(rows @ weight), [256])
        result.copy_(gathered)

    replay = make_capture(torch.device(device))(run) if device == "cuda" else again(run)
    for number in range(3):
        rows.fill_(number)
        replay()
        assert (result == number).all()


@ANYWHERE
def test_an_engine_whose_sums_go_by_nccl_gives_the_same_ids(
    device: str, communicator: Communicator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its steps are captured."""
    needs_flash(device)
    model, fresh = tiny_models.save(tmp_path, *FLASH_FAMILIES["Llama"]), dict(enumerate(prompts()))
    connections = list[str]()

    def connected(own: Any, plan: TpPlan, alone: Communicator) -> None:
        """As in a world of several: sums of attention and of the feed-forward, and gathered logits."""
        connect_shards(own, make_tp_plan(model, 1), communicator)
        connections.append("of all layers")  # a count of sums would be compiled with the layers, and guarded

    monkeypatch.setattr(passes, "connect_shards", connected)
    engine: Engine = engine_on(device, tmp_path, monkeypatch, dtype="bfloat16")
    assert isinstance(engine.graphs, CudaGraphs) and connections
    with noted(engine) as (computed, replayed):
        check_near(model, fresh, play(engine, fresh), "batched")
    assert len(replayed) == len(computed) > 0
    check_near(model, fresh, play(engine, fresh, prefill_tokens=7), "chunked")
