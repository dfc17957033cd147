"""The layers of a model that have adapters, and where the adapters' weights lie on the device."""

import math
from collections.abc import Mapping
from ctypes import addressof, byref
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from common.settings.settings import Settings
from gpu_worker.engine.adapters.targets import LoraTarget
from gpu_worker.engine.adapters.weights import AdapterWeights, LowRankPair
from gpu_worker.engine.batch.adapters import AdaptedStep, AdaptedTokens
from gpu_worker.engine.batch.inputs import to_device
from gpu_worker.engine.cpu import native
from gpu_worker.engine.cpu.packed_linear import ALIGNED_BYTES, LargePages, NativeLinear
from gpu_worker.engine.cuda.adapters import KernelAdapters, add_adapters
from gpu_worker.engine.parallel.tensor_parallel import connect

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
    """The targets of a model, with the adapters on the device as each has them. Native kernels multiply those
    of native layers, on top of a layer's product or within fused layers (kernels/adapters.h); torch
    multiplies the others, one adapter after the other.

    Attributes:
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
        device: torch.device,
    ) -> None:
        self.model = model
        self.targets = targets
        self.max_rank = max_rank
        self.device = device
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

    @property
    def capturable(self) -> bool:
        """Whether a captured step follows the adapters of its rows; on CPU it runs again."""
        return self.device.type == "cpu" and not self.linears

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

    def settle(self, layers: Mapping[str, LowRankPair]) -> Mapping[str, LowRankPair]:
        """Move what was packed of an adapter, by the names of targets, next to each other in large pages: a
        step of native kernels reads a little of each of many adapters.
        """
        if not self.linears:
            return layers
        pages = LargePages(sum(packed.nbytes + 2 * ALIGNED_BYTES for packed in layers.values()))
        return {name: packed.moved(pages.move) for name, packed in layers.items()}

    @torch.inference_mode()
    def place(self, slot: int, weights: AdapterWeights) -> None:
        """Put an adapter into a slot, in place of what it had."""
        found = {self.targets[name].module: pair for name, pair in weights.layers.items()}
        self.placed[slot] = {
            module: pair.moved(lambda tensor: tensor.to(self.device)) for module, pair in found.items()
        }
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
                order = to_device(tokens.order, self.device, torch.int64)
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
    return HostAdapters(*sizes, device)


def multiplies_adapters(device: torch.device) -> bool:
    """Whether kernels multiply adapters on the device."""
    return device.type == "cuda" and find_spec("triton") is not None
