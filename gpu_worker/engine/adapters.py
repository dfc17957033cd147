"""LoRA adapters: the layers of a model that one can change, and this rank's part of each; the weights of one,
read from `adapter_model.safetensors` and checked against these layers; where they lie on the device; and the
adapters of an engine.

Native layers of the CPU multiply adapters where these lie in memory of the host. All others have buffers of a
fixed place and size, which captured steps read: [slots, rank, inputs] and [slots, outputs, rank].

The device has MAX_LORAS slots; a step has no more adapters than that. What a slot has is replaced, least
recently used first, between two steps, and never while the next step needs it. The host keeps the weights of
MAX_CPU_LORAS adapters; others are read again when rows want them.

All ranks obey the same commands and launch the same steps, so their slots are the same.
"""

import logging
import math
import socket
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from ctypes import addressof, byref
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.nn import functional

from common.adapters import WEIGHTS, AdapterConfig, AdapterFault, digest_of, find_folder, read_config
from common.settings.settings import Settings
from gpu_worker.engine.attention.backend import zeros
from gpu_worker.engine.batch.inputs import AdaptedStep, AdaptedTokens, to_device
from gpu_worker.engine.batch.row import Adapter, RowSlice, StepPart, StepSlices
from gpu_worker.engine.cpu import native
from gpu_worker.engine.cpu.packed_linear import ALIGNED_BYTES, LargePages, NativeLinear
from gpu_worker.engine.model.weights import TEXT_KEY_MAPPING, listed, renamed
from gpu_worker.engine.parallel.communicator import Communicator
from gpu_worker.engine.parallel.model_parallel import (
    Forward,
    Interval,
    RemoteEmbedding,
    RemoteLayer,
    TensorShards,
    connect,
    intervals_of,
    mixer_prefixes,
)
from gpu_worker.protocol import AdapterAnswer, SetAdapter, refuse

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class LoraTarget:
    """A layer that an adapter can change.

    Attributes:
        inputs, outputs: features of the whole layer; the inputs of an embedding are its ids.
        own_inputs, own_outputs: intervals of them that this rank has.
        is_embedding: it takes ids.
        is_head: its inputs are the tokens whose logits are needed.
    """

    name: str
    module: Any
    inputs: int
    outputs: int
    own_inputs: Sequence[Interval]
    own_outputs: Sequence[Interval]
    is_embedding: bool = False
    is_head: bool = False

    @property
    def scale(self) -> float:
        """What the layer multiplies its outputs with, as Gemma's embedding does."""
        return float(getattr(self.module, "embed_scale", 1.0)) if self.is_embedding else 1.0

    @property
    def own_size(self) -> tuple[int, int]:
        """Inputs and outputs that this rank has."""
        own = self.own_inputs, self.own_outputs
        inputs, outputs = (sum(end - begin for begin, end in intervals) for intervals in own)
        return inputs, outputs

    def part(self, down: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's part of `down` [rank, inputs] and `up` [outputs, rank], of any dtype."""
        own_down = torch.cat([down[:, begin:end] for begin, end in self.own_inputs], 1)
        return own_down, torch.cat([up[begin:end] for begin, end in self.own_outputs])


def find_targets(model: Any, shards: Mapping[str, TensorShards], rank: int) -> dict[str, LoraTarget]:
    """The targets in this rank's part of a model, by name. `shards`: how parameters [...] of any dtype are
    split between ranks.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    mixers = mixer_prefixes(model)  # they are called with parts of a step
    # attention over latents multiplies with a layer's weights without a call of it
    absorbed = {f"{name}.kv_b_proj" for name, module in model.named_modules() if hasattr(module, "expand_kv")}
    targets = {}
    for name, module in model.named_modules():
        size = size_of(module, embedding)
        if size is None or name in absorbed or ".experts." in name or name.startswith(mixers):
            continue
        if type(module).__name__.endswith("Router"):  # Phi-MoE's, a linear layer that returns more
            continue
        is_embedding, sizes, own = module is embedding, [*size], [[(0, features)] for features in size]
        if split := shards.get(f"{name}.weight"):
            dim = (split.dim == 1) == is_embedding  # the weights of an embedding are [ids, features]
            sizes[dim] = whole = split.packed * split.intervals[-1][1]
            own[dim] = intervals_of(split, whole, rank)
        targets[name] = LoraTarget(
            name, module, sizes[0], sizes[1], own[0], own[1], is_embedding, module is head
        )
    return targets


def size_of(module: Any, embedding: Any) -> tuple[int, int] | None:
    """Inputs and outputs of a layer; None for a module that is none."""
    if module is embedding and isinstance(module, nn.Embedding):
        return module.num_embeddings, module.embedding_dim
    if type(module).__name__ == "Conv1D":  # of transformers: GPT-2's linear layers
        return int(module.nx), int(module.nf)
    sizes = getattr(module, "in_features", None), getattr(module, "out_features", None)
    return sizes if all(isinstance(size, int) for size in sizes) else None  # type: ignore[return-value]


def is_elsewhere(model: Any, layer: str) -> bool:
    """Whether another stage has the layer."""
    module = model
    for part in layer.split("."):
        if isinstance(module, RemoteLayer | RemoteEmbedding):
            return True
        module = getattr(module, part, None)
        if module is None:
            return False
    return isinstance(module, RemoteLayer | RemoteEmbedding | nn.Identity)


PREFIX = "base_model.model."
DOWN = (".lora_A.weight", ".lora_embedding_A")
UP = (".lora_B.weight", ".lora_embedding_B")
FROZEN = ".base_layer.weight"
"""PEFT saves the base model's embedding and head, too, where an adapter has matrices for them."""


@dataclass(frozen=True, slots=True)
class LowRankPair:
    """What an adapter adds to a layer: down [rank, inputs], up [outputs, rank], with its scaling; float32, or
    of the layer's dtype once it is packed, for native kernels with up [panels, rank, panel]. Those of an
    embedding have the same shapes: its inputs are ids.
    """

    down: torch.Tensor
    up: torch.Tensor

    @property
    def rank(self) -> int:
        return len(self.down)

    @property
    def nbytes(self) -> int:
        return self.down.nbytes + self.up.nbytes

    def moved(self, move: Callable[[torch.Tensor], torch.Tensor]) -> "LowRankPair":
        """The same in other memory."""
        return LowRankPair(move(self.down), move(self.up))


Packed = Mapping[str, LowRankPair]
"""The weights of an adapter in memory of the host, as the device takes them, by the names of targets."""


def stamp_of(folder: Path) -> tuple[int, ...]:
    """What changes with its weights: inode, size and time of the last change. Raises OSError."""
    found = (folder / WEIGHTS).stat()
    return found.st_ino, found.st_size, found.st_mtime_ns


def read_adapter(folder: Path, layers: "AdapterLayers") -> Packed:
    """Read an adapter for the layers of a model. Raises AdapterFault."""
    config, file = read_config(folder), folder / WEIGHTS
    found: dict[str, LowRankPair] = {}
    try:
        with safe_open(file, framework="pt") as opened:
            keys = set(opened.keys())
            for layer, names in layers_of(keys).items():
                target = find_target(layer, layers.model, layers.targets)
                if target and (frozen := f"{PREFIX}{layer}{FROZEN}") in keys:
                    check_vocabulary(layer, opened.get_slice(frozen).get_shape(), target)
                tensors = opened.get_tensor(names[0]), opened.get_tensor(names[1])
                pair = make_pair(layer, *tensors, config, layers.max_rank, target)
                if target and target.name in found:
                    raise AdapterFault(f"it has matrices for {layer} under two names")
                if target:
                    found[target.name] = pack_pair(pair, target, layers)
    except (SafetensorError, OSError, RuntimeError) as error:
        raise AdapterFault(f"{file} is damaged or no safetensors file: {error}") from error
    return layers.settle(found)


def pack_pair(pair: LowRankPair, target: LoraTarget, layers: "AdapterLayers") -> LowRankPair:
    """This rank's part of what an adapter adds to a layer, as the device takes it. Raises AdapterFault."""
    packed = layers.pack(target, *target.part(pair.down, pair.up * target.scale))
    if not (packed.down.isfinite().all() and packed.up.isfinite().all()):
        kind = str(packed.down.dtype).removeprefix("torch.")
        cause = f"the matrices of {target.name}, scaled as {kind}, have numbers that are not finite"
        raise AdapterFault(cause)
    return packed


def layers_of(keys: Collection[str]) -> dict[str, tuple[str, str]]:
    """By the names of layers: the names of their two matrices. Raises AdapterFault."""
    halves: list[dict[str, str]] = [
        {key.removeprefix(PREFIX).removesuffix(end): key for key in keys for end in ends if key.endswith(end)}
        for ends in (DOWN, UP)
    ]
    downs, ups = halves
    known = {*downs.values(), *ups.values()}
    others = sorted(key for key in keys if key not in known and not key.endswith(FROZEN))
    alone = sorted(downs.keys() ^ ups.keys())
    refuse(
        AdapterFault,
        (others, f"it has {listed(others)}, which is not served; only matrices A and B are"),
        (alone, f"it has one of two matrices only for {listed(alone)}"),
        (not downs, "it has no matrices"),
    )
    return {layer: (downs[layer], ups[layer]) for layer in sorted(downs)}


def find_target(layer: str, model: Any, targets: Mapping[str, LoraTarget]) -> LoraTarget | None:
    """The target of a layer; None if another stage has it. Raises AdapterFault if none has."""
    names = [layer, renamed(f"{layer}.", TEXT_KEY_MAPPING)[:-1]]
    found = next((targets[name] for name in names if name in targets), None)
    if found is None and any(name.startswith(mixer_prefixes(model)) for name in names):
        raise AdapterFault(f"it has matrices for {layer}, which has states, and adapters change none such")
    if found is None and not any(is_elsewhere(model, name) for name in names):
        raise AdapterFault(f"it has matrices for {layer}, and this model has no such linear layer")
    return found


def check_vocabulary(layer: str, shape: list[int], target: LoraTarget) -> None:
    """Raises AdapterFault if it was trained with another vocabulary: `shape` of the layer's weights."""
    if sorted(shape) != sorted((target.inputs, target.outputs)):
        raise AdapterFault(f"it was trained with a {layer} of {shape}: tokens that were added are not served")


def make_pair(
    layer: str,
    down: torch.Tensor,
    up: torch.Tensor,
    config: AdapterConfig,
    max_rank: int,
    target: LoraTarget | None,
) -> LowRankPair:
    """A layer's matrices, A [rank, inputs] and B [outputs, rank] of any float dtype. Raises AdapterFault."""
    if down.dim() != 2 or up.dim() != 2 or not (down.is_floating_point() and up.is_floating_point()):
        raise AdapterFault(f"the matrices of {layer} are no matrices of floats")
    rank, found = len(down), f"{down.shape[1]} → {len(up)}"
    own = f"{target.inputs} → {target.outputs}" if target else found
    refuse(
        AdapterFault,
        (up.shape[1] != rank, f"the matrices of {layer} are {list(down.shape)} and {list(up.shape)}"),
        (rank > max_rank, f"the rank of {layer} is {rank}, more than MAX_LORA_RANK ({max_rank})"),
        (own != found, f"the matrices of {layer} are for {found} features, and the model has {own}"),
    )
    return LowRankPair(down.float(), up.float() * config.scaling(layer, rank))


# --- in the layers of a model -------------------------------------------------------------------------------


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
            ranks = self.ranks[np.flatnonzero(np.diff(step[0].starts))].max(0, initial=0)
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


def find_same(wanted: SetAdapter) -> Path:
    """Return the folder of an adapter on a machine other than rank 0's. Raises AdapterFault if there are
    other files.
    """
    host = socket.gethostname()
    try:
        folder, _ = find_folder(wanted.source)
        digest = digest_of(folder)
    except AdapterFault as fault:
        raise AdapterFault(f"on {host}: {fault}") from fault
    if digest != wanted.digest:
        raise AdapterFault(f"{folder} on {host} has other files than on the machine of rank 0")
    return folder


def takes_adapters(settings: Settings, device: torch.device) -> bool:
    """Whether a model takes adapters: on CUDA only if asked, since the memory is taken at the start."""
    is_asked = device.type == "cpu" or len(settings.lora_adapters) > 0
    return is_asked if settings.enable_lora is None else settings.enable_lora


# --- in an engine -------------------------------------------------------------------------------------------


KEPT_OF_EACH_SLOT = 4
"""The default of MAX_CPU_LORAS: so many times MAX_LORAS."""


class AdapterCache(StepPart):
    """The adapters of an engine.

    Attributes:
        known: by name; rows that start may have these.
        host: weights in memory of the host, least recently used first.
        used: adapters on the device, least recently used first.
    """

    failure = "adapter"

    def __init__(self, layers: AdapterLayers | None, settings: Settings, communicator: Communicator) -> None:
        self.layers = layers
        self.num_slots = settings.max_loras if layers else 0
        self.num_kept = (settings.max_cpu_loras or KEPT_OF_EACH_SLOT * self.num_slots) if layers else 0
        self.communicator = communicator
        self.known: dict[str, Adapter] = {}
        self.host: dict[Adapter, Packed] = {}
        self.used: dict[Adapter, None] = {}

    def obey(self, command: SetAdapter, in_use: Iterable[Adapter]) -> AdapterAnswer:
        """Load or unload an adapter; rows go on with those `in_use`."""
        if command.path:
            answer = self.load(command)
        else:
            self.known.pop(command.name, None)
            answer = AdapterAnswer(command.name)
        self.forget_all_but({*self.known.values(), *in_use})
        return answer

    def load(self, command: SetAdapter) -> AdapterAnswer:
        """Load an adapter on all ranks, or on none."""
        name, info = command.name, self.communicator.info
        is_elsewhere = info.rank != info.local_rank  # where no agent has looked at the files
        adapter = Adapter(name, command.path)
        weights, cause = self.read_on_all_ranks(adapter, command if is_elsewhere else None)
        if weights is None:
            log.warning("adapter %s is refused: %s", name, cause)
            return AdapterAnswer(name, cause)
        self.known[name] = adapter
        self.keep(adapter, weights)
        log.info("adapter %s is loaded", name)
        return AdapterAnswer(name)

    def read_on_all_ranks(
        self, adapter: Adapter, wanted: SetAdapter | None = None
    ) -> tuple[Packed | None, str]:
        """What this rank has of an adapter, if all can read theirs; else None, and the first cause. One that
        was read before must have the files of then, and one that is `wanted` the files of rank 0's machine.
        """
        weights, cause, folder = None, "", Path(adapter.folder)
        try:
            if self.layers is None:
                raise AdapterFault("this worker takes no adapters (ENABLE_LORA)")
            if wanted:
                folder = find_same(wanted)
                adapter.folder = str(folder)
            stamp = stamp_of(folder)
            if adapter.stamp not in ((), stamp):
                raise AdapterFault(f"{folder} has changed since it was loaded")
            adapter.stamp = stamp
            weights = read_adapter(folder, self.layers)
        except AdapterFault as fault:
            cause = str(fault)
        except Exception as error:  # whatever is in the files of others, the worker goes on
            log.warning("adapter %s", folder, exc_info=True)
            cause = f"{folder} cannot be read: {getattr(error, 'strerror', None) or repr(error)}"
        cause = next(filter(None, self.communicator.exchange(cause)), "")
        return (None if cause else weights), cause

    def keep(self, adapter: Adapter, weights: Packed) -> None:
        """Keep weights in memory of the host, in place of those least recently used."""
        self.host.pop(adapter, None)
        self.host[adapter] = weights
        while len(self.host) > self.num_kept:
            del self.host[next(iter(self.host))]

    def forget_all_but(self, needed: Collection[Adapter]) -> None:
        """Forget adapters that no row can have any more."""
        for adapter in {*self.host, *self.used} - {*needed}:
            self.host.pop(adapter, None)
            self.used.pop(adapter, None)
            adapter.slot = -1

    def prepare(self, rows: Any, slices: StepSlices) -> Sequence[RowSlice]:
        """Put the adapters of the step on the device; without those that cannot be read any more."""
        asked = dict.fromkeys(part.row.adapter for part in slices.others if part.row.adapter)
        lost = {adapter for adapter in asked if not self.bring(adapter, asked)}
        return slices if not lost else [part for part in slices if part.row.adapter not in lost]

    def bring(self, adapter: Adapter, needed: Collection[Adapter]) -> bool:
        """Put an adapter into a slot, unless it has one: a free one, or that of an adapter that the step does
        not need → whether its weights can be read.
        """
        if adapter.slot < 0:
            weights = self.host.get(adapter)
            if weights is None:  # all ranks read it again, or none does
                weights, cause = self.read_on_all_ranks(adapter)
                if weights is None:
                    log.error("adapter %s cannot be read again: %s", adapter.name, cause)
                    return False
            self.keep(adapter, weights)
            if len(self.used) < self.num_slots:
                adapter.slot = min({*range(self.num_slots)} - {other.slot for other in self.used})
            else:
                oldest = next(other for other in self.used if other not in needed)
                adapter.slot, oldest.slot = oldest.slot, -1
                del self.used[oldest]
            assert self.layers
            self.layers.place(adapter.slot, weights)
        self.used.pop(adapter, None)
        self.used[adapter] = None
        return True
