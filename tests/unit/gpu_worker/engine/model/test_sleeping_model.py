"""Weights of a sleeping model: copied to the host, freed, and copied back into the same tensors."""

import torch
from torch import nn

from gpu_worker.engine.model.sleeping_model import SleepingModel, unique_storages


def test_weights_go_and_come_back_into_the_same_tensors_and_views() -> None:
    """Tied weights are kept once. A view of a weight, as fused layers have, sees what came back."""
    first, second = nn.Linear(4, 6), nn.Linear(6, 4, bias=False)
    model = nn.Sequential(first, second)
    second.weight = nn.Parameter(first.weight.detach().T)
    model.register_buffer("table", torch.arange(5))
    view = first.weight.detach()[2:4]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    rows = view.clone()
    storages = unique_storages([*model.parameters(), *model.buffers()])
    assert len(storages) == 3
    asleep = SleepingModel(torch.device("cpu"), storages, num_blocks=7, spare_bytes=0)
    asleep.offload()
    assert [storage.nbytes() for storage in storages] == [0, 0, 0]
    asleep.reload()
    assert not asleep.copies
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert torch.equal(view, rows)


def test_on_cpu_weights_stay_where_they_are_and_the_cache_has_its_size_again() -> None:
    asleep = SleepingModel.of([nn.Linear(4, 6)], torch.device("cpu"), num_blocks=7)
    assert asleep.storages == []
    assert asleep.blocks_left(block_bytes=100) == 7
