"""Floors of a step's duration on this device, which benchmarks/engine.py prints: the bytes that it must read
over the bandwidth, or its floating-point operations over the rate of matrix products, whichever is longer.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM

from common import model_files
from common.rank import RankInfo
from common.settings.settings import Settings
from gpu_worker.engine.attention.kv_cache import Geometry
from gpu_worker.engine.model.config import read_config
from gpu_worker.engine.model.load import choose_device, choose_dtype

COPIED_BYTES = {"cpu": 2**28, "cuda": 2**32}
"""Bytes of a copy, far more than caches hold."""
SIDE = {"cpu": 2048, "cuda": 8192}
"""Rows and columns of the matrices that are multiplied, by the type of the device."""
TIMES = 10


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Measured on this device: bytes read and written in a second by a copy, and floating-point operations in
    a second of a product.
    """

    bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights that a step multiplies with: all but input embeddings that are not the output's too.

    Of a mixture of experts all are counted, so its share of the floor is too good for few rows.

    Attributes:
        num_weights: weights of all matrices.
        head: weights of the last matrix, which multiplies only tokens whose logits are needed.
    """

    num_weights: int
    head: int
    itemsize: int

    @property
    def num_bytes(self) -> int:
        return self.num_weights * self.itemsize


def measure(settings: Settings) -> tuple[Ceilings, Weights]:
    """Measures the device; to be called before an engine takes its memory."""
    device = choose_device(settings.device, RankInfo())
    torch.set_num_threads(settings.threads or torch.get_num_threads())
    dtype = choose_dtype(settings.dtype, device)
    dtypes = (
        {dtype, torch.float32} if device.type == "cpu" else {dtype}
    )  # some processors multiply float32 faster
    ceilings = Ceilings(copy_rate(device), max(product_rate(device, each) for each in dtypes))
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return ceilings, weights_of(settings, dtype)


def copy_rate(device: torch.device) -> float:
    source = torch.randint(0, 100, (COPIED_BYTES[device.type],), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * len(source) / best_s(lambda: target.copy_(source), device)


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


def weights_of(settings: Settings, dtype: torch.dtype) -> Weights:
    config = read_config(
        model_files.resolve(settings.model_id, settings.revision, dtype=settings.dtype), settings
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
    num_weights = sum(weight.numel() for weight in model.parameters())
    inputs, outputs = model.get_input_embeddings(), model.get_output_embeddings()
    excluded = 0 if inputs.weight is outputs.weight else inputs.weight.numel()
    return Weights(num_weights - excluded, outputs.weight.numel(), dtype.itemsize)


def kv_bytes(geometry: Geometry, context: int) -> int:
    """Returns the bytes that attention reads for one row."""
    each = (
        min(context, layer.spec.window or context) * layer.spec.kv_heads * (layer.key_dim + layer.value_dim)
        for layer in geometry.layers
    )
    return sum(each) * geometry.kv_dtype.itemsize


def floor_ms(ceilings: Ceilings, weights: Weights, tokens: int, samples: int, read_bytes: int) -> float:
    """Returns the shortest possible duration of a step: `samples` of its tokens need logits, `read_bytes` are
    read from the cache. The operations of attention are left out.
    """
    moved_s = (weights.num_bytes + read_bytes) / ceilings.bytes_per_s
    flops = 2 * ((weights.num_weights - weights.head) * tokens + weights.head * samples)
    return max(moved_s, flops / ceilings.flops_per_s) * 1e3
