"""The layers of a model that have adapters, and where the adapters' weights lie on the device."""

from collections.abc import Mapping
from typing import Any

import torch

from common.settings.settings import Settings
from gpu_worker.engine.adapters.targets import LoraTarget, find_targets
from gpu_worker.engine.adapters.weights import AdapterWeights, LowRankPair
from gpu_worker.engine.batch.adapters import AdaptedStep
from gpu_worker.engine.cpu.adapters import NativeAdapters
from gpu_worker.engine.cpu.packed_linear import ALIGNED_BYTES, NativeLinear, region
from gpu_worker.engine.cuda.adapters import TensorAdapters
from gpu_worker.engine.parallel.shards import TensorShards


class Pages:
    """Memory of large pages for the tensors of one adapter."""

    def __init__(self, num_bytes: int) -> None:
        self.free = region(num_bytes) if num_bytes else torch.empty(0, dtype=torch.uint8)

    def move(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a tensor [...] of any dtype, after those copied before."""
        own, size = self.free[: tensor.nbytes], -(-tensor.nbytes // ALIGNED_BYTES) * ALIGNED_BYTES
        self.free = self.free[size:]
        return own.view(tensor.dtype).view(tensor.shape).copy_(tensor)


class AdapterLayers:
    """The targets of a model. They give their own outputs in steps without adapters.

    Attributes:
        native: of the layers that native kernels multiply; None without such layers.
        tensors: of all others.
    """

    def __init__(
        self,
        model: Any,
        targets: Mapping[str, LoraTarget],
        num_slots: int,
        max_rank: int,
        max_tokens: int,
        device: torch.device,
    ) -> None:
        self.model = model
        self.targets = targets
        self.max_rank = max_rank
        natives = [target for target in targets.values() if isinstance(target.module, NativeLinear)]
        others = [target for target in targets.values() if not isinstance(target.module, NativeLinear)]
        for target in targets.values():
            target.module.is_head = target.is_head
        modules = [target.module for target in natives]
        self.native = NativeAdapters(modules, num_slots) if modules else None
        sizes = (num_slots, max_rank, max_tokens)
        own = {target.module: target.own_size for target in others}
        self.tensors = TensorAdapters(own, *sizes, model.dtype, device)

    @property
    def capturable(self) -> bool:
        """Whether a captured step follows the adapters of its rows: kernels read them on the device."""
        return self.native is None and self.tensors.capturable

    def pack(self, target: LoraTarget, down: torch.Tensor, up: torch.Tensor) -> LowRankPair:
        """down [rank, inputs] and up [outputs, rank], float32, of this rank → as the layer's kernels take
        them
        """
        if self.native and isinstance(target.module, NativeLinear):
            return self.native.pack(target.module, down, up)
        return self.tensors.pack(down, up)

    def settle(self, layers: Mapping[str, LowRankPair]) -> dict[str, LowRankPair]:
        """Move what was packed of an adapter, by the names of targets, next to each other in large pages: a
        step reads a little of each of many adapters.
        """
        natives = {
            name: packed
            for name, packed in layers.items()
            if isinstance(self.targets[name].module, NativeLinear)
        }
        pages = Pages(sum(packed.nbytes + 2 * ALIGNED_BYTES for packed in natives.values()))
        return {**layers, **{name: packed.moved(pages.move) for name, packed in natives.items()}}

    @torch.inference_mode()
    def place(self, slot: int, weights: AdapterWeights) -> None:
        """Put an adapter into a slot, in place of what it had."""
        found = {self.targets[name].module: packed for name, packed in weights.layers.items()}
        if self.native:
            self.native.place(slot, found)
        self.tensors.place(slot, found)

    @torch.inference_mode()
    def prepare(self, step: AdaptedStep | None) -> None:
        """Set the step that runs."""
        if self.native:
            self.native.prepare(step)
        self.tensors.prepare(step)


def make_adapter_layers(
    model: Any,
    shards: Mapping[str, TensorShards],
    rank: int,
    settings: Settings,
    device: torch.device,
    max_tokens: int,
) -> AdapterLayers | None:
    """Where the adapters of a model go; None if it takes none. `shards`: how parameters [...] of any dtype
    are split. It comes before the ranks' parts are connected: what adapters add is a part of what they sum.
    """
    is_asked = device.type == "cpu" or len(settings.lora_adapters) > 0
    if not (is_asked if settings.enable_lora is None else settings.enable_lora):
        return None
    targets = find_targets(model, shards, rank)
    return AdapterLayers(model, targets, settings.max_loras, settings.max_lora_rank, max_tokens, device)
