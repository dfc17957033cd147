"""Hidden states: what modules get, also where a graph writes it to one place again and again."""

import torch
from torch import nn

from gpu_worker.engine.drafting.eagle import HiddenStates


def test_the_inputs_of_modules_are_kept_beside_each_other() -> None:
    first, second = nn.Linear(4, 2), nn.Linear(2, 3)
    states = HiddenStates([first, second], 9, torch.device("cpu"))
    inputs = torch.rand(1, 5, 4)
    middle = first(inputs)
    second(middle)
    assert torch.equal(states.newest(5), torch.cat((inputs[0], middle[0]), -1))
    assert torch.equal(states.newest(2), torch.cat((inputs[0], middle[0]), -1)[:2])


def test_on_cuda_they_are_copied_to_a_place_that_stays() -> None:
    states = HiddenStates([], 4, torch.device("cuda"))
    states.recorded = [torch.empty(0)]
    rows = [torch.rand(size, 3) for size in (2, 4, 6)]
    states.record(0, rows[0])
    place = states.recorded[0].data_ptr()
    assert torch.equal(states.newest(2), rows[0])
    for one in rows[1:]:  # of the last only as many as there is room for: it belongs to no step of rows
        states.record(0, one)
        assert torch.equal(states.newest(4), one[:4])
    assert states.recorded[0].data_ptr() == place
