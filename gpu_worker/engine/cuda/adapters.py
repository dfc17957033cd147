"""LoRA adapters of layers that torch multiplies: on CUDA in buffers of a fixed place and size, which captured
steps read; on CPU as each adapter has them.
"""

from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from gpu_worker.engine.adapters.weights import LowRankPair
from gpu_worker.engine.batch.adapters import AdaptedStep, AdaptedTokens
from gpu_worker.engine.batch.inputs import to_device
from gpu_worker.engine.parallel.tensor_parallel import connect

Forward = Callable[..., torch.Tensor]


def multiplies_adapters(device: torch.device) -> bool:
    """Whether kernels multiply adapters on the device."""
    return device.type == "cuda" and find_spec("triton") is not None


class DeviceTokens:
    """Which tokens of a step have an adapter, where captured steps read it.

    Attributes:
        slots: int64 [most tokens]; -1: no adapter.
        order: int32 [most tokens]; tokens with an adapter, those of one slot next to each other.
        starts: int32 [slots + 1]; where the tokens of a slot begin in `order`.
        groups, places: the same on the host, and `order` as int64, for torch.
    """

    def __init__(self, num_tokens: int, num_slots: int, device: torch.device) -> None:
        self.slots = torch.full((num_tokens,), -1, dtype=torch.int64, device=device)
        self.order = torch.zeros(num_tokens, dtype=torch.int32, device=device)
        self.starts = torch.zeros(num_slots + 1, dtype=torch.int32, device=device)
        self.groups: Sequence[tuple[int, int, int]] = ()
        self.places = torch.zeros(0, dtype=torch.int64, device=device)

    def set(self, tokens: AdaptedTokens, by_kernels: bool) -> None:
        """Take a step's tokens, for kernels or for torch."""
        device = self.slots.device
        if not by_kernels:
            self.groups = tokens.groups
            self.places = to_device(tokens.order, device, torch.int64)
            return
        counts = np.bincount(tokens.slots[tokens.order], minlength=len(self.starts) - 1)
        starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
        self.slots.fill_(-1)
        for target, numbers in (
            (self.slots, tokens.slots),
            (self.order, tokens.order),
            (self.starts, starts),
        ):
            target[: len(numbers)].copy_(to_device(numbers, device))


class TensorAdapters:
    """The adapters on the device.

    Attributes:
        by_kernels: Triton multiplies, with buffers of the modules: [slots, rank, inputs] and [slots, outputs,
            rank]. Else torch does, group by group.
        active: some token of the step has an adapter.
        tokens, kept: of the step: all tokens, and those whose logits are needed.
        ranks: int32 [slots]; the largest rank of what is placed there.
        has_matrices: whether what is placed there changes any of the modules.
    """

    def __init__(
        self,
        modules: Mapping[Any, tuple[int, int]],
        num_slots: int,
        max_rank: int,
        max_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.by_kernels = multiplies_adapters(device)
        self.has_buffers = self.by_kernels or device.type == "cuda"
        self.active = False
        self.modules = modules
        self.dtype = dtype
        most = max_tokens if self.by_kernels else 0
        self.tokens = DeviceTokens(most, num_slots, device)
        self.kept = DeviceTokens(most, num_slots, device)
        self.ranks = torch.zeros(num_slots, dtype=torch.int32, device=device)
        self.has_matrices = [False] * num_slots
        for module, (inputs, outputs) in modules.items():
            module.placed = [None] * num_slots
            if self.has_buffers:
                down = torch.zeros(num_slots, max_rank, inputs, dtype=dtype, device=device)
                up = torch.zeros(num_slots, outputs, max_rank, dtype=dtype, device=device)
                module.register_buffer("adapter_down", down, persistent=False)
                module.register_buffer("adapter_up", up, persistent=False)
                module.placed = [LowRankPair(*pair) for pair in zip(down, up, strict=True)]
            connect(module, add_adapters, adapters=self)

    @property
    def capturable(self) -> bool:
        """Whether a captured step may have adapters; on CPU nothing is captured, it runs again."""
        return self.by_kernels or not self.ranks.is_cuda

    def pack(self, down: torch.Tensor, up: torch.Tensor) -> LowRankPair:
        """down [rank, inputs] and up [outputs, rank], float32"""
        pair = down.to(self.dtype), up.to(self.dtype)
        is_on_gpu = self.ranks.is_cuda
        return LowRankPair(*(tensor.contiguous().pin_memory() if is_on_gpu else tensor for tensor in pair))

    def place(self, slot: int, pairs: Mapping[Any, Any]) -> None:
        """Put an adapter's matrices, by modules, in place of what the slot had; those of others are not
        looked at.
        """
        own = {module: pairs.get(module) for module in self.modules}
        rank = max((len(pair.down) for pair in own.values() if pair), default=0)
        self.ranks[slot], self.has_matrices[slot] = rank, rank > 0
        for module, pair in own.items():
            if not self.has_buffers:
                module.placed[slot] = pair
                continue
            place = module.placed[slot]
            place.down.zero_()
            place.up.zero_()
            if pair:
                rank = len(pair.down)
                place.down[:rank].copy_(pair.down, non_blocking=True)
                place.up[:, :rank].copy_(pair.up, non_blocking=True)

    def prepare(self, step: AdaptedStep | None) -> None:
        """Set the step that runs."""
        self.active = step is not None and (self.by_kernels or self.is_changed_by(step))
        if step and self.active:
            self.tokens.set(step.tokens, self.by_kernels)
            self.kept.set(step.kept, self.by_kernels)

    def is_changed_by(self, step: AdaptedStep) -> bool:
        """Whether an adapter of the step has matrices for a module."""
        return any(self.has_matrices[slot] for slot, *_ in step.tokens.groups)

    def add(self, module: Any, inputs: torch.Tensor, output: torch.Tensor) -> None:
        """Add to `output` [..., outputs] of the model's dtype what the adapters of `inputs` give: [...,
        inputs], or ids int64 [...].
        """
        tokens = self.kept if module.is_head else self.tokens
        flat = output.flatten(0, -2)
        rows = inputs.flatten() if inputs.dtype == torch.int64 else inputs.flatten(0, -2)
        if self.by_kernels:
            pair = module.adapter_down, module.adapter_up
            add_low_rank(flat, rows, *pair, self.ranks, tokens.slots, tokens.order, tokens.starts)
        else:
            add_by_groups(flat, rows, module.placed, tokens)


def add_adapters(module: Any, forward: Forward, inputs: torch.Tensor, **options: Any) -> torch.Tensor:
    """inputs [..., inputs] of the model's dtype, or ids int64 [...] → [..., outputs]"""
    output = forward(module, inputs, **options)
    if module.adapters.active:
        module.adapters.add(module, inputs, output)
    return output


def add_by_groups(
    output: torch.Tensor, rows: torch.Tensor, placed: Sequence[LowRankPair | None], tokens: DeviceTokens
) -> None:
    """Add to `output` [tokens, outputs], one adapter after the other. rows [tokens, inputs], or ids int64
    [tokens]
    """
    for slot, first, end in tokens.groups:
        if pair := placed[slot]:
            places = tokens.places[first:end]
            own = rows[places]
            shrunk = pair.down[:, own].T if own.dtype == torch.int64 else own @ pair.down.T
            output.index_add_(0, places, shrunk @ pair.up.T)


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
