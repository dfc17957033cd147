"""Floors of a step, counted as the weights are stored."""

import pytest
import torch
from torch import nn

from benchmarks.floors import Ceilings, Matrix, Weights, floor_ms, weights_of
from gpu_worker.engine.cpu import native, packed_linear
from gpu_worker.engine.cpu.packed_linear import LargePages, NativeLinear
from gpu_worker.engine.quantization.blocks import Blocks


class Model(nn.Module):
    """An embedding, a norm, a layer and a head."""

    def __init__(self, layer: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.embedding = nn.Embedding(96, 64)
        self.norm = nn.LayerNorm(64)
        self.layer = layer
        self.head = head

    def get_output_embeddings(self) -> nn.Module:
        return self.head


def test_the_longer_of_reads_and_operations_counts() -> None:
    weights = Weights(Matrix(1000, 2000), Matrix(500, 1000))
    slow = Ceilings(bytes_per_s=1e3, flops_per_s=1e9)
    assert floor_ms(slow, weights, 1, 1, 1000) == 4e3, "weights and cache are read once"
    busy = Ceilings(bytes_per_s=1e9, flops_per_s=1e3)
    assert floor_ms(busy, weights, 3, 2, 1000) == 2 * (3 * 1000 + 2 * 500), "few tokens need logits"


def test_embeddings_are_not_read_and_a_tied_head_is() -> None:
    model = Model(nn.Linear(64, 64, bias=True), nn.Linear(64, 96, bias=False))
    model.head.weight = model.embedding.weight
    weights = weights_of(model, 1)
    assert weights == Weights(Matrix(64 * 64, 4 * 64 * 64), Matrix(96 * 64, 4 * 96 * 64))
    assert weights.num_bytes == 4 * (64 * 64 + 96 * 64)


@pytest.mark.parametrize("beside", [True, False])
def test_weights_in_blocks_count_as_they_are_stored(beside: bool) -> None:
    blocks = Blocks(torch.zeros(96, 64, dtype=torch.uint8), torch.ones(96, 2).half(), None)
    library = native.library()
    if not library or not packed_linear.multiplies_correctly(library, torch.bfloat16):
        pytest.skip("torch's products are used on this processor")
    linear = nn.Linear(64, 96, bias=False).bfloat16()
    layer = NativeLinear(linear, library, False, LargePages(), blocks, beside)
    model = Model(layer, nn.Linear(64, 96, bias=False))
    few, many = (weights_of(model, rows).layers for rows in (1, 32))
    plain = Matrix(64 * 96, 64 * 96 * 2)
    in_blocks = Matrix(64 * 96, 64 * 96 // 2 + 2 * 2 * 96)  # 4 bits each, and two scales of 16 bits an output
    assert many == (plain if beside else in_blocks)
    assert few == (in_blocks if library.tf_block_rows() else many)
