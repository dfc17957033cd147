"""Attention by torch in float32 on CPU, and by another backend, of the same random numbers."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from gpu_worker.engine.attention.backend import Geometry, KVCache, LayerSpec, attach
from gpu_worker.engine.attention.sdpa import SdpaBackend
from gpu_worker.engine.batch.inputs import build_inputs
from gpu_worker.engine.batch.row import Row, StepSlices, arrange
from tests.support.engine.row_steps import BLOCKS, CPU, STEPS, chunk, rows

LENGTHS = (70, 1, 33, 90)


class Pair:
    """Attention of the layers of `geometry` by `other`, a backend for them, and by torch.

    Attributes:
        error, relative: how far the other's outputs may be from torch's.
        exact_kv: what torch's cache holds K and V in.
        caches, modules: torch's, then the other's; modules of each layer.
    """

    def __init__(
        self,
        geometry: Geometry,
        other: Any,
        error: float,
        relative: float = 0.0,
        device: torch.device = CPU,
        exact_kv: torch.dtype = torch.float32,
    ) -> None:
        self.geometry, self.other, self.device = geometry, other, device
        self.error, self.relative = error, relative
        exact = Geometry(geometry.layers, geometry.block_size, torch.float32, exact_kv)
        self.backends, self.devices = (SdpaBackend(exact, CPU), other), (CPU, device)
        self.caches, self.modules = [], []
        for backend, where in zip(self.backends, self.devices, strict=True):
            self.caches.append(KVCache(backend.geometry, BLOCKS, where))
            self.modules.append([nn.Module() for _ in geometry.layers])
            attach(self.modules[-1], backend.geometry, self.caches[-1], backend)

    def tokens(self, count: int, layer: int = 0) -> list[torch.Tensor]:
        """Query, key and value, with strides as model code leaves them."""
        own: LayerSpec = self.geometry.layers[layer]
        query_dim = own.key_dim + own.value_dim if own.latent else own.key_dim
        heads = own.kv_heads * own.group
        shapes = ((heads, query_dim), (own.kv_heads, own.key_dim), (own.kv_heads, own.value_dim))
        return [torch.randn(1, count, *shape).to(self.geometry.dtype).transpose(1, 2) for shape in shapes]

    def attend(
        self,
        slices: StepSlices,
        given: list[torch.Tensor],
        sinks: torch.Tensor | None = None,
        layer: int = 0,
    ) -> list[torch.Tensor]:
        outputs = []
        for backend, modules, device in zip(self.backends, self.modules, self.devices, strict=True):
            backend.prepare_forward(build_inputs(slices, self.geometry.block_size, device))
            own = None if sinks is None else sinks.to(device)
            moved = (tensor.to(device, backend.geometry.dtype) for tensor in given)
            outputs.append(backend.attend(modules[layer], *moved, own))
        return outputs

    def check(self, outputs: list[torch.Tensor], what: Any) -> None:
        exact, found = outputs[0], outputs[1].float().cpu()
        torch.testing.assert_close(
            found, exact, rtol=self.relative, atol=self.error, msg=lambda text: f"{what}: {text}"
        )

    def check_steps(self, sinks: torch.Tensor | None = None) -> list[Row]:
        """Prompts, rows that decode beside them, and rows that decode → the rows."""
        lines = rows(self.geometry.block_size, LENGTHS)
        for step in STEPS:
            slices = parts_of(lines, step)
            for layer in range(len(self.geometry.layers)):
                given = self.tokens(sum(part.count for part in slices), layer)
                self.check(self.attend(slices, given, sinks, layer), step)
        return lines


def parts_of(lines: Sequence[Row], step: Sequence[tuple[int, int, int]]) -> StepSlices:
    return arrange([chunk(lines[row], begin, count) for row, begin, count in step])


def decoding(
    slices: StepSlices, rest: int = 0, device: torch.device = CPU
) -> tuple[torch.Tensor, torch.Tensor]:
    """→ positions int32 [rows], table int32 [rows, blocks] of rows that decode, and of `rest` that only fill
    a graph.
    """
    table = torch.zeros(len(slices) + rest, BLOCKS, dtype=torch.int32)
    for line, row_slice in zip(table, slices, strict=False):
        line[: len(row_slice.row.blocks)] = torch.from_numpy(row_slice.row.blocks)
    positions = torch.tensor([*(row_slice.begin for row_slice in slices), *[0] * rest], dtype=torch.int32)
    return positions.to(device), table.to(device)
