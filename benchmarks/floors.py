"""How fast a step could be at best on this device: what it must read over the bandwidth, or compute over the
rate of products.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM

from common import model_files
from common.settings.settings import Settings
from gpu_worker.engine.attention.kv_cache import Geometry
from gpu_worker.engine.model.config import read_config
from gpu_worker.engine.model.load import choose_device, choose_dtype
from gpu_worker.rank import Place

COPIED_BYTES = {"cpu": 2**28, "cuda": 2**32}
"""Far more than caches hold."""
SIDE = {"cpu": 2048, "cuda": 8192}
"""Of the matrices that are multiplied, by the type of the device."""
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
    """What a step must multiply with: all but the input embeddings, where these are not the output's, too. Of
    a mixture of experts all are counted, so its share of the floor is too good for few rows.

    Attributes:
        numbers: of all matrices; `head` of the last one, which only tokens go through whose logits are
            wanted.
    """

    numbers: int
    head: int
    itemsize: int

    @property
    def num_bytes(self) -> int:
        return self.numbers * self.itemsize


def measure(settings: Settings) -> tuple[Ceilings, Weights]:
    """Before an engine takes the device's memory."""
    device = choose_device(settings.device, Place())
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
    """Of random numbers: with zeros, some cards are faster."""
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
    numbers = sum(weight.numel() for weight in model.parameters())
    inputs, outputs = model.get_input_embeddings(), model.get_output_embeddings()
    alone = 0 if inputs.weight is outputs.weight else inputs.weight.numel()
    return Weights(numbers - alone, outputs.weight.numel(), dtype.itemsize)


def kv_bytes(geometry: Geometry, context: int) -> int:
    """What attention reads for one row."""
    each = (
        min(context, layer.spec.window or context) * layer.spec.kv_heads * (layer.key_dim + layer.value_dim)
        for layer in geometry.layers
    )
    return sum(each) * geometry.dtype.itemsize


def floor_ms(ceilings: Ceilings, weights: Weights, tokens: int, samples: int, read_bytes: int) -> float:
    """Of a step of so many tokens, some of which sample, that reads so much of the cache. What attention
    computes is left out.
    """
    moved_s = (weights.num_bytes + read_bytes) / ceilings.bytes_per_s
    flops = 2 * ((weights.numbers - weights.head) * tokens + weights.head * samples)
    return max(moved_s, flops / ceilings.flops_per_s) * 1e3
