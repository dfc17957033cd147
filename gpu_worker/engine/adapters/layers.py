"""The layers of a model that have LoRA adapters, and where the adapters' weights lie on the device. On CUDA
kernels multiply them from buffers of a fixed place and size, which captured steps read.
"""

import math
from collections.abc import Mapping
from ctypes import addressof, byref
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from common.settings.settings import Settings
from gpu_worker.engine.adapters.targets import LoraTarget
from gpu_worker.engine.adapters.weights import LowRankPair, Packed
from gpu_worker.engine.batch.adapters import AdaptedStep, AdaptedTokens
from gpu_worker.engine.batch.inputs import to_device
from gpu_worker.engine.cpu import native
from gpu_worker.engine.cpu.packed_linear import ALIGNED_BYTES, LargePages, NativeLinear
from gpu_worker.engine.parallel.tensor_parallel import Forward, connect


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

    def settle(self, layers: Packed) -> Packed:
        """What was packed of an adapter stays where it is."""
        return layers

    @torch.inference_mode()
    def place(self, slot: int, weights: Packed) -> None:
        """Put an adapter into a slot, in place of what it had."""
        own = weights.values()
        self.ranks[slot] = max((pair.rank for pair in own), default=0)
        for name, target in self.targets.items():
            down, up = target.module.adapter_down[slot].zero_(), target.module.adapter_up[slot].zero_()
            if pair := weights.get(name):
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


RANKS = 4
"""Ranks of native layers are multiples of it, as in kernels/adapters.h."""
RUN_TOKENS = 16
"""Tokens of one adapter that one thread takes at once."""


class PreparedTokens:
    """The tokens of a step as the kernels take them; `struct` points into the arrays."""

    def __init__(
        self, tokens: AdaptedTokens, matrices: Any, used: npt.NDArray[np.uint8], max_rank: int
    ) -> None:
        runs = [
            (slot, begin, min(RUN_TOKENS, end - begin))
            for slot, first, end in tokens.groups
            for begin in range(first, end, RUN_TOKENS)
        ]
        self.used = used
        self.arrays = (np.array(runs, np.int32), tokens.order, tokens.slots, used)
        pointers = (array.ctypes.data for array in self.arrays)
        sizes = (len(used), max_rank, len(runs))
        self.struct = native.AdaptersStruct(addressof(matrices), *sizes, *pointers)


class HostAdapters:
    """The targets of a model on CPU, with the adapters as each has them. Native kernels multiply those
    of native layers, on top of a layer's product or within fused layers (kernels/adapters.h); torch
    multiplies the others, one adapter after the other.

    Attributes:
        capturable: a captured step, which on CPU runs again, follows the adapters of its rows.
        linears: native layers; the kernels' table `matrices` has those of each slot in this order.
        placed: by slot, by module; the table points into these.
        ranks: int32 [slots, native layers]
        tokens, kept: of the step that runs: all tokens, and those whose logits are needed; None if none has
            an adapter.
        others: modules for which torch multiplies.
        groups: of that step for torch, by whether logits are needed: slots, and their tokens int64 [tokens];
            empty if no adapter of the step changes any of these.
    """

    def __init__(
        self,
        model: Any,
        targets: Mapping[str, LoraTarget],
        num_slots: int,
        max_rank: int,
    ) -> None:
        self.model = model
        self.targets = targets
        self.max_rank = max_rank
        self.linears: list[Any] = []
        self.others: set[Any] = set()
        self.placed: list[Mapping[Any, LowRankPair]] = [{} for _ in range(num_slots)]
        for target in targets.values():
            linear = target.module
            linear.is_head = target.is_head
            if isinstance(linear, NativeLinear):
                linear.number, linear.adapters = len(self.linears), self
                self.linears.append(linear)
            else:
                connect(linear, add_adapters, adapters=self)
                self.others.add(linear)
        self.matrices = (native.LowRankStruct * (num_slots * len(self.linears)))()
        self.ranks = np.zeros((num_slots, len(self.linears)), np.int32)
        self.tokens: PreparedTokens | None = None
        self.kept: PreparedTokens | None = None
        self.groups: dict[bool, list[tuple[int, torch.Tensor]]] = {}
        self.capturable = not self.linears

    @property
    def active(self) -> bool:
        """Whether torch has adapters to add in the step that runs."""
        return bool(self.groups)

    def pack(self, target: LoraTarget, down: torch.Tensor, up: torch.Tensor) -> LowRankPair:
        """down [rank, inputs] and up [outputs, rank], float32, of this rank → as the layer's kernels take
        them
        """
        linear, dtype = target.module, self.model.dtype
        if isinstance(linear, NativeLinear):
            spare_ranks = -len(down) % RANKS
            spare_outputs = linear.panels * linear.panel - len(up)
            down = functional.pad(down, (0, 0, 0, spare_ranks))
            up = functional.pad(up, (0, spare_ranks, 0, spare_outputs))
            up, dtype = up.view(linear.panels, linear.panel, -1).transpose(1, 2), linear.weight_dtype
        return LowRankPair(down.to(dtype).contiguous(), up.to(dtype).contiguous())

    def settle(self, layers: Packed) -> Packed:
        """Move what was packed of an adapter, by the names of targets, next to each other in large pages: a
        step of native kernels reads a little of each of many adapters.
        """
        if not self.linears:
            return layers
        pages = LargePages(sum(packed.nbytes + 2 * ALIGNED_BYTES for packed in layers.values()))
        return {name: packed.moved(pages.move) for name, packed in layers.items()}

    @torch.inference_mode()
    def place(self, slot: int, weights: Packed) -> None:
        """Put an adapter into a slot, in place of what it had."""
        self.placed[slot] = {self.targets[name].module: pair for name, pair in weights.items()}
        for number, linear in enumerate(self.linears):
            pair = self.placed[slot].get(linear)
            self.ranks[slot, number] = pair.rank if pair else 0
            own = (pair.down.data_ptr(), pair.up.data_ptr(), pair.rank) if pair else (None, None, 0)
            self.matrices[slot * len(self.linears) + number] = native.LowRankStruct(*own)

    @torch.inference_mode()
    def prepare(self, step: AdaptedStep | None) -> None:
        """Set the step that runs."""
        self.tokens, self.kept, self.groups = None, None, {}
        if step and self.linears:
            ranks = self.ranks[[slot for slot, *_ in step.tokens.groups]].max(0, initial=0)
            used, max_rank = (ranks > 0).astype(np.uint8), int(ranks.max())
            self.tokens = PreparedTokens(step.tokens, self.matrices, used, max_rank)
            self.kept = PreparedTokens(step.kept, self.matrices, used, max_rank)
        if step and any(self.others & self.placed[slot].keys() for slot, *_ in step.tokens.groups):
            for is_head, tokens in ((False, step.tokens), (True, step.kept)):
                order = torch.from_numpy(tokens.order).long()
                self.groups[is_head] = [(slot, order[first:end]) for slot, first, end in tokens.groups]

    @property
    def address(self) -> int | None:
        """Of what fused layers read; None if no token of the step has an adapter."""
        return addressof(self.tokens.struct) if self.tokens else None

    def add_native(self, linear: Any, rows: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """Add to `output` [..., outputs], of the layer's dtype or float32, what the adapters of `rows` [...,
        inputs] give. Raises RuntimeError if these are not the tokens of the step, one after the other.
        """
        prepared = self.kept if linear.is_head else self.tokens
        if prepared is None or not prepared.used[linear.number]:
            return output
        rows, num_rows = rows.contiguous(), math.prod(rows.shape[:-1])
        if num_rows != (num_tokens := len(prepared.arrays[2])):
            raise RuntimeError(f"a layer with adapters got {num_rows} rows in a step of {num_tokens} tokens")
        threads, shape = torch.get_num_threads(), byref(linear.struct)
        pointers = (byref(prepared.struct), linear.whole, output.data_ptr())
        linear.library.tf_adapt(linear.dtype, threads, rows.data_ptr(), num_rows, shape, *pointers)
        return output

    def add(self, module: Any, rows: torch.Tensor, output: torch.Tensor) -> None:
        """As KernelAdapters.add."""
        for slot, places in self.groups[module.is_head]:
            if pair := self.placed[slot].get(module):
                own = rows[places]
                shrunk = pair.down[:, own].T if own.dtype == torch.int64 else own @ pair.down.T
                output.index_add_(0, places, shrunk @ pair.up.T)


AdapterLayers = HostAdapters | KernelAdapters
"""Layers give their own outputs in steps without adapters."""


def takes_adapters(settings: Settings, device: torch.device) -> bool:
    """Whether a model takes adapters: on CUDA only if asked, since the memory is taken at the start."""
    is_asked = device.type == "cpu" or len(settings.lora_adapters) > 0
    return is_asked if settings.enable_lora is None else settings.enable_lora


def make_adapter_layers(
    model: Any,
    targets: Mapping[str, LoraTarget],
    settings: Settings,
    device: torch.device,
    max_tokens: int,
) -> AdapterLayers:
    """Where the adapters of a model go. It comes before the ranks' parts are connected: what adapters add is
    a part of what they sum.
    """
    sizes = model, targets, settings.max_loras, settings.max_lora_rank
    if multiplies_adapters(device):
        return KernelAdapters(*sizes, max_tokens, device)
    return HostAdapters(*sizes)


def multiplies_adapters(device: torch.device) -> bool:
    """Whether Triton's kernels multiply adapters on the device."""
    return device.type == "cuda"
