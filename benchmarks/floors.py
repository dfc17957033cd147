"""Floors of a step's duration on this device, which benchmarks/engine.py prints: the bytes that it must read
over the bandwidth, or its floating-point operations over the rate of matrix products, whichever is longer.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn

from common.rank import RankInfo
from common.settings.settings import Settings
from gpu_worker.engine.attention.backend import Geometry
from gpu_worker.engine.cpu.packed_linear import NativeLinear, OneDnnLinear, region
from gpu_worker.engine.model.load import choose_device, choose_dtype

READ_BYTES = {"cpu": 2**28, "cuda": 2**32}
"""Bytes that are read, by the type of the device. On CPU they are as many as a small model's weights, which
the caches of large processors may hold in part.
"""
ROW_NUMBERS = 4096
SIDE = {"cpu": 2048, "cuda": 8192}
"""Rows and columns of the matrices that are multiplied, by the type of the device."""
TIMES = 10


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Measured on this device: bytes read in a second, and floating-point operations in a second of a
    product.
    """

    bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True, slots=True)
class Matrix:
    """Weights that a step multiplies with.

    Attributes:
        num_weights: how many there are.
        num_bytes: bytes that are read of them, once a step.
    """

    num_weights: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Weights:
    """Matrices of a model. Of a mixture of experts all are counted, so its share of the floor is too good for
    few rows.

    Attributes:
        layers: those that multiply every token, together.
        head: the last one, which multiplies only tokens whose logits are needed.
    """

    layers: Matrix
    head: Matrix

    @property
    def num_bytes(self) -> int:
        return self.layers.num_bytes + self.head.num_bytes


def measure(settings: Settings) -> Ceilings:
    """Measures the device; to be called before an engine takes its memory."""
    device = choose_device(settings.device, RankInfo())
    torch.set_num_threads(settings.threads or torch.get_num_threads())
    dtype = choose_dtype(settings.dtype, device)
    dtypes = (
        {dtype, torch.float32} if device.type == "cpu" else {dtype}
    )  # some processors multiply float32 faster
    ceilings = Ceilings(read_rate(device), max(product_rate(device, each) for each in dtypes))
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return ceilings


def read_rate(device: torch.device) -> float:
    """Measures sums of rows: on CPU in large pages, in which weights lie, too."""
    num_bytes = READ_BYTES[device.type]
    memory = (
        region(num_bytes)
        if device.type == "cpu"
        else torch.empty(num_bytes, dtype=torch.uint8, device=device)
    )
    rows = memory.view(torch.float32).view(-1, ROW_NUMBERS).fill_(1)
    return num_bytes / best_s(lambda: rows.sum(1), device)


def product_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Measures products of random numbers: with zeros, some cards are faster."""
    side = SIDE[device.type]
    left, right = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    return 2 * side**3 / best_s(lambda: left @ right, device)


def best_s(run: Callable[[], object], device: torch.device) -> float:
    times = []
    for _ in range(TIMES):
        synchronize(device)
        began = time.perf_counter()
        run()
        synchronize(device)
        times.append(time.perf_counter() - began)
    return min(times)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def weights_of(model: nn.Module, rows: int) -> Weights:
    """Returns what a step of `rows` tokens reads and multiplies: embeddings and norms are left out."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    layers = [matrix_of(module, rows) for module in model.modules() if module is not head]
    total = Matrix(sum(each.num_weights for each in layers), sum(each.num_bytes for each in layers))
    return Weights(total, matrix_of(head, rows))


def matrix_of(module: nn.Module, rows: int) -> Matrix:
    """Returns a module's own weights, without those of the modules in it."""
    if isinstance(module, nn.Embedding):
        return Matrix(0, 0)
    tensors = list(stored_weights(module, rows))
    num_weights = sum(tensor.numel() for tensor in tensors)
    if hasattr(module, "in_features"):  # several weights may lie in one number
        num_weights = module.in_features * module.out_features  # type: ignore[operator, assignment]
    return Matrix(num_weights, sum(tensor.numel() * tensor.itemsize for tensor in tensors))


def stored_weights(module: nn.Module, rows: int) -> Iterable[torch.Tensor]:
    """Returns the tensors of any shape and dtype that the module reads for so many rows."""
    if isinstance(module, OneDnnLinear):
        return [module.packed]
    if isinstance(module, NativeLinear):
        if module.blocks and (module.packed is None or rows <= module.library.tf_block_rows(module.dtype)):
            return module.tensors
        return [] if module.packed is None else [module.packed]
    return (tensor for tensor in module.parameters(recurse=False) if tensor.dim() > 1)


def kv_bytes(geometry: Geometry, context: int) -> int:
    """Returns the bytes that attention reads for one row."""
    each = (
        min(context, layer.window or context) * layer.kv_heads * (layer.key_dim + layer.value_dim)
        for layer in geometry.layers
    )
    return sum(each) * geometry.kv_dtype.itemsize


def floor_ms(ceilings: Ceilings, weights: Weights, tokens: int, samples: int, read_bytes: int) -> float:
    """Returns the shortest possible duration of a step: `samples` of its tokens need logits, `read_bytes` are
    read from the cache. The operations of attention are left out.
    """
    moved_s = (weights.num_bytes + read_bytes) / ceilings.bytes_per_s
    flops = 2 * (weights.layers.num_weights * tokens + weights.head.num_weights * samples)
    return max(moved_s, flops / ceilings.flops_per_s) * 1e3
