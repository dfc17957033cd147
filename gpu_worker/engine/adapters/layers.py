"""The layers of a model that have LoRA adapters, and where the adapters' weights lie on the device.

Native layers of the CPU multiply adapters where these lie in memory of the host. All others have buffers of a
fixed place and size, which captured steps read: [slots, rank, inputs] and [slots, outputs, rank].
"""

import math
from collections.abc import Mapping
from ctypes import addressof, byref
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from common.settings.settings import Settings
from gpu_worker.engine.adapters.weights import LoraTarget, LowRankPair, Packed
from gpu_worker.engine.attention.backend import zeros
from gpu_worker.engine.batch.adapters import AdaptedStep, AdaptedTokens
from gpu_worker.engine.batch.inputs import to_device
from gpu_worker.engine.cpu import native
from gpu_worker.engine.cpu.packed_linear import ALIGNED_BYTES, LargePages, NativeLinear
from gpu_worker.engine.parallel.model_parallel import Forward, connect


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
        self.slots.fill_(-1)
        self.starts.fill_(len(tokens.order))
        own = tokens.slots, tokens.order, tokens.starts
        for target, numbers in zip((self.slots, self.order, self.starts), own, strict=True):
            target[: len(numbers)].copy_(to_device(numbers, self.slots.device))


def add_adapters(module: Any, forward: Forward, inputs: torch.Tensor, **options: Any) -> torch.Tensor:
    """inputs [..., inputs] of the model's dtype, or ids int64 [...] → [..., outputs]"""
    output = forward(module, inputs, **options)
    if module.adapters.active:
        rows = inputs.flatten() if inputs.dtype == torch.int64 else inputs.flatten(0, -2)
        tokens = module.adapters.tokens[module.is_head]
        own = module.adapter_down, module.adapter_up, module.adapter_ranks
        added = add_low_rank(output.flatten(0, -2), rows, *own, tokens.slots, tokens.order, tokens.starts)
        output = added.view(output.shape)
    return output


@torch.library.custom_op("tokenfleet::add_low_rank", mutates_args=())
def add_low_rank(
    output: torch.Tensor,
    rows: torch.Tensor,
    down: torch.Tensor,
    up: torch.Tensor,
    ranks: torch.Tensor,
    slots: torch.Tensor,
    order: torch.Tensor,
    starts: torch.Tensor,
) -> torch.Tensor:
    """`output` [tokens, outputs] and what adapters give: rows [tokens, inputs] of the model's dtype, or ids
    int64 [tokens]; down [slots, rank, inputs], up [slots, outputs, rank], ranks int32 [slots]; the rest as in
    DeviceTokens. The sum is a new tensor: torch's compiler fails where a part of a merged product is changed.
    """
    output = output.clone(memory_format=torch.contiguous_format)
    if output.is_cuda:
        from gpu_worker.engine.cuda.kernels import adapters  # Triton: in CUDA builds only

        if rows.dtype == torch.int64:
            shrunk = down[slots[: len(rows)].clamp(min=0), :, rows].float()
        else:
            shrunk = adapters.shrink(rows, down, ranks, order, starts)
        adapters.expand(output, shrunk, up, ranks, order, starts)
        return output
    bounds = starts.tolist()
    for slot, rank in enumerate(ranks.tolist()):  # one adapter after the other
        if rank and len(places := order[bounds[slot] : bounds[slot + 1]].long()):
            own, part = rows[places], down[slot, :rank]
            shrunk = part[:, own].T if own.dtype == torch.int64 else own @ part.T
            output.index_add_(0, places, shrunk @ up[slot, :, :rank].T)
    return output


@add_low_rank.register_fake
def shape_of(output: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(output, memory_format=torch.contiguous_format)


RANKS = 4
"""Ranks of native layers are multiples of it, as in kernels/adapters.h."""
RUN_TOKENS = 16
"""Tokens of one adapter that one thread takes at once."""


class PreparedTokens:
    """The tokens of a step as native kernels take them; `struct` points into the arrays."""

    def __init__(
        self, tokens: AdaptedTokens, matrices: Any, used: npt.NDArray[np.uint8], max_rank: int
    ) -> None:
        runs = [
            (slot, begin, min(RUN_TOKENS, end - begin))
            for slot, (first, end) in enumerate(pairwise(tokens.starts.tolist()))
            for begin in range(first, end, RUN_TOKENS)
        ]
        self.used = used
        self.arrays = (np.array(runs, np.int32), tokens.order, tokens.slots, used)
        pointers = (array.ctypes.data for array in self.arrays)
        sizes = (len(used), max_rank, len(runs))
        self.struct = native.structs["Adapters"](addressof(matrices), *sizes, *pointers)


class AdapterLayers:
    """The targets of a model, which give their own outputs in steps without adapters. Native kernels multiply
    on top of a layer's product, or within fused layers (kernels/adapters.h).

    It is made before the ranks' parts are connected: what adapters add is a part of what they sum.

    Attributes:
        active: some token of the step has an adapter.
        tokens: of the step, by whether they are those whose logits are needed.
        linears: native layers; the kernels' table `matrices` has those of each slot in this order.
        placed: by slot, what the table points into.
        ranks: int32 [slots, native layers]
        prepared: `tokens` as native kernels take them; empty if no token of the step has an adapter.
    """

    def __init__(
        self,
        model: Any,
        targets: Mapping[str, LoraTarget],
        settings: Settings,
        device: torch.device,
        max_tokens: int,
    ) -> None:
        self.model = model
        self.targets = targets
        self.max_rank, num_slots = settings.max_lora_rank, settings.max_loras
        self.active = False
        self.tokens = [DeviceTokens(max_tokens, num_slots, device) for _ in range(2)]
        self.linears: list[NativeLinear] = []
        self.placed: list[Packed] = [{} for _ in range(num_slots)]
        for target in targets.values():
            module = target.module
            if isinstance(module, NativeLinear):
                module.number, module.adapters, module.is_head = len(self.linears), self, target.is_head
                self.linears.append(module)
                continue
            inputs, outputs = target.own_size
            down = zeros((num_slots, self.max_rank, inputs), model.dtype, device)
            up = zeros((num_slots, outputs, self.max_rank), model.dtype, device)
            ranks = torch.zeros(num_slots, dtype=torch.int32, device=device)
            connect(module, add_adapters, adapters=self, is_head=target.is_head)
            for name, buffer in (("down", down), ("up", up), ("ranks", ranks)):
                module.register_buffer(f"adapter_{name}", buffer, persistent=False)
        self.matrices = (native.structs["LowRank"] * (num_slots * len(self.linears)))()
        self.ranks = np.zeros((num_slots, len(self.linears)), np.int32)
        self.prepared: list[PreparedTokens] = []

    @property
    def capturable(self) -> bool:
        """Whether captured steps may have adapters: kernels read the same buffers in each."""
        return not self.linears

    def pack(self, target: LoraTarget, down: torch.Tensor, up: torch.Tensor) -> LowRankPair:
        """down [rank, inputs] and up [outputs, rank], float32, of this rank → as kernels take them"""
        linear, dtype = target.module, self.model.dtype
        if isinstance(linear, NativeLinear):
            spare_ranks = -len(down) % RANKS
            spare_outputs = linear.panels * linear.panel - len(up)
            down = functional.pad(down, (0, 0, 0, spare_ranks))
            up = functional.pad(up, (0, spare_ranks, 0, spare_outputs))
            up, dtype = up.view(linear.panels, linear.panel, -1).transpose(1, 2), linear.weight_dtype
        return LowRankPair(down.to(dtype).contiguous(), up.to(dtype).contiguous())

    def settle(self, layers: Packed) -> Packed:
        """Move what was packed of an adapter, by the names of targets: for native kernels next to each other
        in large pages, since a step reads a little of each of many adapters; for CUDA to pinned memory.
        """
        if self.linears:
            pages = LargePages(sum(packed.nbytes + 2 * ALIGNED_BYTES for packed in layers.values()))
            return {name: packed.moved(pages.move) for name, packed in layers.items()}
        if self.model.device.type != "cuda":
            return layers
        return {name: packed.moved(torch.Tensor.pin_memory) for name, packed in layers.items()}

    @torch.inference_mode()
    def place(self, slot: int, weights: Packed) -> None:
        """Put an adapter into a slot, in place of what it had."""
        self.placed[slot] = weights if self.linears else {}
        for name, target in self.targets.items():
            module, pair = target.module, weights.get(name)
            if isinstance(module, NativeLinear):
                self.ranks[slot, module.number] = pair.rank if pair else 0
                own = (pair.down.data_ptr(), pair.up.data_ptr(), pair.rank) if pair else (None, None, 0)
                self.matrices[slot * len(self.linears) + module.number] = native.structs["LowRank"](*own)
                continue
            module.adapter_ranks[slot] = pair.rank if pair else 0
            if pair:
                module.adapter_down[slot, : pair.rank].copy_(pair.down, non_blocking=True)
                module.adapter_up[slot, :, : pair.rank].copy_(pair.up, non_blocking=True)

    @torch.inference_mode()
    def prepare(self, step: AdaptedStep | None) -> None:
        """Set the step that runs."""
        self.active, self.prepared = step is not None, []
        if step is None:
            return
        for tokens, own in zip(self.tokens, step, strict=True):
            tokens.set(own)
        if self.linears:
            ranks = self.ranks[np.flatnonzero(np.diff(step.tokens.starts))].max(0, initial=0)
            used, max_rank = (ranks > 0).astype(np.uint8), int(ranks.max())
            self.prepared = [PreparedTokens(own, self.matrices, used, max_rank) for own in step]

    @property
    def address(self) -> int | None:
        """Of what fused layers read; None if no token of the step has an adapter."""
        return addressof(self.prepared[0].struct) if self.prepared else None

    def add_native(self, linear: Any, rows: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """Add to `output` [..., outputs], of the layer's dtype or float32, what the adapters of `rows` [...,
        inputs] give. Raises RuntimeError if these are not the tokens of the step, one after the other.
        """
        prepared = self.prepared[linear.is_head] if self.prepared else None
        if prepared is None or not prepared.used[linear.number]:
            return output
        rows, num_rows = rows.contiguous(), math.prod(rows.shape[:-1])
        if num_rows != (num_tokens := len(prepared.arrays[2])):
            raise RuntimeError(f"a layer with adapters got {num_rows} rows in a step of {num_tokens} tokens")
        threads, shape = torch.get_num_threads(), byref(linear.struct)
        pointers = (byref(prepared.struct), linear.whole, output.data_ptr())
        linear.library.tf_adapt(linear.dtype, threads, rows.data_ptr(), num_rows, shape, *pointers)
        return output


def takes_adapters(settings: Settings, device: torch.device) -> bool:
    """Whether a model takes adapters: on CUDA only if asked, since the memory is taken at the start."""
    is_asked = device.type == "cpu" or len(settings.lora_adapters) > 0
    return is_asked if settings.enable_lora is None else settings.enable_lora
