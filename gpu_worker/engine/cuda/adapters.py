"""LoRA adapters on CUDA: kernels multiply them from buffers of a fixed place and size, which captured steps
read.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from gpu_worker.engine.adapters.targets import LoraTarget
from gpu_worker.engine.adapters.weights import AdapterWeights, LowRankPair
from gpu_worker.engine.batch.adapters import AdaptedStep, AdaptedTokens
from gpu_worker.engine.batch.inputs import to_device
from gpu_worker.engine.parallel.tensor_parallel import connect

Forward = Callable[..., torch.Tensor]


class DeviceTokens:
    """Which tokens of a step have an adapter, where captured steps read it.

    Attributes:
        slots: int64 [most tokens]; -1: no adapter.
        order: int32 [most tokens]; tokens with an adapter, those of one slot next to each other.
        starts: int32 [slots + 1]; where the tokens of a slot begin in `order`.
    """

    def __init__(self, num_tokens: int, num_slots: int, device: torch.device) -> None:
        self.slots = torch.full((num_tokens,), -1, dtype=torch.int64, device=device)
        self.order = torch.zeros(num_tokens, dtype=torch.int32, device=device)
        self.starts = torch.zeros(num_slots + 1, dtype=torch.int32, device=device)

    def set(self, tokens: AdaptedTokens) -> None:
        """Take a step's tokens."""
        counts = np.bincount(tokens.slots[tokens.order], minlength=len(self.starts) - 1)
        starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
        self.slots.fill_(-1)
        for target, numbers in (
            (self.slots, tokens.slots),
            (self.order, tokens.order),
            (self.starts, starts),
        ):
            target[: len(numbers)].copy_(to_device(numbers, self.slots.device))


class KernelAdapters:
    """The targets of a model, with buffers of the adapters on the device: [slots, rank, inputs] and [slots,
    outputs, rank].

    Attributes:
        active: some token of the step has an adapter.
        tokens, kept: of the step: all tokens, and those whose logits are needed.
        ranks: int32 [slots]; the largest rank of what is placed there.
    """

    capturable = True

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
        self.active = False
        self.tokens = DeviceTokens(max_tokens, num_slots, device)
        self.kept = DeviceTokens(max_tokens, num_slots, device)
        self.ranks = torch.zeros(num_slots, dtype=torch.int32, device=device)
        for target in targets.values():
            inputs, outputs = target.own_size
            down = torch.zeros(num_slots, max_rank, inputs, dtype=model.dtype, device=device)
            up = torch.zeros(num_slots, outputs, max_rank, dtype=model.dtype, device=device)
            target.module.register_buffer("adapter_down", down, persistent=False)
            target.module.register_buffer("adapter_up", up, persistent=False)
            connect(target.module, add_adapters, adapters=self, is_head=target.is_head)

    def pack(self, target: LoraTarget, down: torch.Tensor, up: torch.Tensor) -> LowRankPair:
        """down [rank, inputs] and up [outputs, rank], float32, of this rank → as the kernels take them"""
        pair = LowRankPair(down.to(self.model.dtype), up.to(self.model.dtype))
        return pair.moved(lambda tensor: tensor.contiguous().pin_memory() if self.ranks.is_cuda else tensor)

    def settle(self, layers: Mapping[str, LowRankPair]) -> Mapping[str, LowRankPair]:
        """What was packed of an adapter stays where it is."""
        return layers

    @torch.inference_mode()
    def place(self, slot: int, weights: AdapterWeights) -> None:
        """Put an adapter into a slot, in place of what it had."""
        own = weights.layers.values()
        self.ranks[slot] = max((pair.rank for pair in own), default=0)
        for name, target in self.targets.items():
            down, up = target.module.adapter_down[slot].zero_(), target.module.adapter_up[slot].zero_()
            if pair := weights.layers.get(name):
                down[: pair.rank].copy_(pair.down, non_blocking=True)
                up[:, : pair.rank].copy_(pair.up, non_blocking=True)

    @torch.inference_mode()
    def prepare(self, step: AdaptedStep | None) -> None:
        """Set the step that runs."""
        self.active = step is not None
        if step:
            self.tokens.set(step.tokens)
            self.kept.set(step.kept)

    def add(self, module: Any, rows: torch.Tensor, output: torch.Tensor) -> None:
        """Add to `output` [tokens, outputs] of the model's dtype what the adapters of `rows` give: [tokens,
        inputs], or ids int64 [tokens].
        """
        tokens, pair = self.kept if module.is_head else self.tokens, (module.adapter_down, module.adapter_up)
        add_low_rank(output, rows, *pair, self.ranks, tokens.slots, tokens.order, tokens.starts)


def add_adapters(module: Any, forward: Forward, inputs: torch.Tensor, **options: Any) -> torch.Tensor:
    """inputs [..., inputs] of the model's dtype, or ids int64 [...] → [..., outputs]"""
    output = forward(module, inputs, **options)
    if module.adapters.active:
        rows = inputs.flatten() if inputs.dtype == torch.int64 else inputs.flatten(0, -2)
        module.adapters.add(module, rows, output.flatten(0, -2))
    return output


@torch.library.custom_op("tokenfleet::add_low_rank", mutates_args=("output",))
def add_low_rank(
    output: torch.Tensor,
    rows: torch.Tensor,
    down: torch.Tensor,
    up: torch.Tensor,
    ranks: torch.Tensor,
    slots: torch.Tensor,
    order: torch.Tensor,
    starts: torch.Tensor,
) -> None:
    """Add to `output` [tokens, outputs] what adapters give: rows [tokens, inputs] of the model's dtype, or
    ids int64 [tokens]; down [slots, rank, inputs] and up [slots, outputs, rank]; the rest as in DeviceTokens.
    """
    from gpu_worker.engine.cuda.kernels import adapters  # Triton: in CUDA builds only

    if rows.dtype == torch.int64:
        own = slots[: len(rows)]
        shrunk = down[own.clamp(min=0), :, rows].float()
    else:
        shrunk = adapters.shrink(rows, down, ranks, order, starts)
    adapters.expand(output, shrunk, up, ranks, order, starts)
