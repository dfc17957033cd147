"""Linear layers on CPU whose weights, plain or in blocks of integers, are packed once at load in the layout
of the kernels that multiply them.
"""

import contextlib
import ctypes
import functools
import logging
import math
import mmap
from collections.abc import Callable
from ctypes import byref
from typing import Any

import torch
from torch import nn

from common.process import machine
from gpu_worker.engine.cpu import native
from gpu_worker.engine.cpu.weight_store import HUGE_BYTES, WeightStore, private_memory
from gpu_worker.engine.quantization.blocks import LARGEST_BLOCK, Blocks, FindBlocks, no_blocks

log = logging.getLogger(__name__)

REGION_BYTES = 2**26
ALIGNED_BYTES = 64
LAYOUT_ROWS = 32
"""The number of rows for which oneDNN's layout is chosen; any number of rows works."""
ONEDNN_DTYPES = (torch.float32, torch.bfloat16)
TRIAL_SIZE = 64
TRIAL_ERROR, ROUNDED_ERROR = 1e-3, 1.0
"""Tolerated errors of a sum of TRIAL_SIZE products of normal numbers, exact and of rounded rows; a wrong sum
is off by about 8.
"""


class LargePages:
    """Allocates tensors, which keep the memory alive, next to each other in pages as large as the system has
    them.

    The processor looks up fewer pages, and reads ahead within a page. Measured on two cores with 270 MB and
    with 1.1 GB of bfloat16 weights: the products of a step take a sixth to a quarter less time at one row, a
    sixth at 8 rows, a twentieth at 32.
    """

    def __init__(self, region_bytes: int = REGION_BYTES) -> None:
        """`region_bytes`: taken from the system at a time."""
        self.region_bytes = region_bytes
        self.regions: list[torch.Tensor] = []
        self.free = torch.empty(0, dtype=torch.uint8)

    def allocate(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Zeros [count] of `dtype`."""
        num_bytes = count * dtype.itemsize
        size = -(-num_bytes // ALIGNED_BYTES) * ALIGNED_BYTES
        if size > len(self.free):
            if self.regions:
                self.regions[-1] = self.regions[-1][: len(self.regions[-1]) - len(self.free)]  # what is used
            self.free = region(max(size, self.region_bytes))
            self.regions.append(self.free)
        begin, self.free = self.free[:num_bytes], self.free[size:]
        return begin.view(dtype)

    def move(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a tensor [...] of any dtype, its numbers in their order."""
        return self.allocate(tensor.numel(), tensor.dtype).view(tensor.shape).copy_(tensor)

    def share(self, store: WeightStore) -> None:
        """Share all tensors with the other engines, once they are written: they can only be read then."""
        try:
            for one in self.regions:
                num_used = len(one) - (len(self.free) if one is self.regions[-1] else 0)
                store.share(one.data_ptr(), -(-num_used // HUGE_BYTES) * HUGE_BYTES)
        except OSError as error:
            log.warning("weights are not shared with other workers: %s", error)


def region(num_bytes: int) -> torch.Tensor:
    """uint8 [at least num_bytes] of private memory: whole large pages."""
    num_bytes = -(-num_bytes // HUGE_BYTES) * HUGE_BYTES
    memory = private_memory(num_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel that has none
            memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    return whole[-whole.data_ptr() % HUGE_BYTES :][:num_bytes]


def pack_blocks(
    blocks: Blocks, panel: int, words: int, pages: LargePages
) -> tuple[ctypes.Structure, list[torch.Tensor]]:
    """Pack blocks in panels of `panel` outputs, with `words` of an output's quants next to each other, as the
    kernels read them (kernels/blocks.h); the struct points into the tensors [...] of several dtypes.
    """
    factors = [factor for factor in (blocks.scales, blocks.offsets) if factor is not None]
    halves = torch.unflatten(in_panels(blocks.quants, panel), 2, (-1, 8 // blocks.bits, 4, words))
    tensors = [
        pages.move(pack_quants(halves.transpose(3, 4).flatten(2), blocks.bits, words)),
        *(pages.move(in_panels(factor, panel).transpose(1, 2)) for factor in factors),
    ]
    quants, scales, offsets = (*(tensor.data_ptr() for tensor in tensors), None)[:3]
    half, codes = blocks.scales.dtype == torch.float16, None
    if blocks.codes is not None:
        tensors.append(pages.move(blocks.codes.float()))
        codes = tensors[-1].data_ptr()
    return native.structs["Blocks"](quants, scales, offsets, codes, blocks.bits, blocks.size, half), tensors


def pack_quants(quants: torch.Tensor, bits: int, words: int) -> torch.Tensor:
    """Integers [panels, panel, inputs] → int32 [panels, inputs / (words * places), panel, words]"""
    places = quants.view(*quants.shape[:2], -1, 32 // bits, words).permute(0, 2, 1, 4, 3)  # [..., places]
    shifted = (places.int() & 2**bits - 1) << torch.arange(0, 32, bits, dtype=torch.int32)
    packed: torch.Tensor = shifted.sum(-1, dtype=torch.int32)
    return packed


def in_panels(tensor: torch.Tensor, panel: int) -> torch.Tensor:
    """[outputs, n], any dtype → [panels, panel, n], the last one filled up with zeros"""
    missing = -len(tensor) % panel
    return torch.nn.functional.pad(tensor, (0, 0, 0, missing)).view(-1, panel, tensor.shape[1])


class PackedLinear(nn.Module):
    """Stands for a linear layer: rows [..., in_features] of the weights' dtype → [..., out_features].
    `product` is its forward, with or without the bias.
    """

    product: Callable[[torch.Tensor, bool], torch.Tensor]

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.bias = linear.bias
        self.weight_dtype = linear.weight.dtype

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.product(rows, True)

    @functools.cached_property
    def weight(self) -> torch.Tensor:
        """[out_features, in_features], computed back by a product with ones: some models look at the weights
        of their routers.
        """
        return (
            self.product(torch.eye(self.in_features, dtype=self.weight_dtype), False)
            .to(self.weight_dtype)
            .T.contiguous()
        )


class OneDnnLinear(PackedLinear):
    """Multiplies rows [..., in_features] of the weights' dtype by oneDNN, which packs plain weights again for
    every product. Measured on two cores: 1.7 times faster at one row in bfloat16, 3 times at eight rows in
    float32.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), LAYOUT_ROWS)

    def product(self, rows: torch.Tensor, biased: bool) -> Any:
        return torch.ops.mkldnn._linear_pointwise(
            rows, self.packed, self.bias if biased else None, "none", [], ""
        )


class NativeLinear(PackedLinear):
    """Multiplies rows [..., in_features] of the weights' dtype by the native kernels: a row's result depends
    on no other row. `whole`: its outputs are float32, whatever the weights are. `blocks`: the same weights in
    blocks, which few rows are multiplied with; all are, without `plain` weights. The bits of a result are the
    same.

    Attributes:
        adapters: LoRA adapters that change the layer; None if it can have none.
        number: the layer's among those that have adapters.
        is_head: its rows are the tokens whose logits are needed.
    """

    adapters: Any = None
    number = 0
    is_head = False

    def __init__(
        self,
        linear: nn.Linear,
        library: ctypes.CDLL,
        whole: bool,
        pages: LargePages,
        blocks: Blocks | None = None,
        plain: bool = True,
    ) -> None:
        super().__init__(linear)
        self.whole = whole
        self.library = library
        self.dtype = native.TYPE_CODES[self.weight_dtype]
        self.panel = library.tf_panel(self.dtype)
        self.panels = -(-self.out_features // self.panel)
        self.blocks: ctypes.Structure | None = None
        self.tensors: list[torch.Tensor] = []
        if blocks:
            self.blocks, self.tensors = pack_blocks(blocks, self.panel, library.tf_words(self.dtype), pages)
        self.packed = self.pack(linear.weight.detach(), pages) if plain else None

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        output = self.product(rows, True)
        return self.adapters.add_native(self, rows, output) if self.adapters else output

    def pack(self, weight: torch.Tensor, pages: LargePages) -> torch.Tensor:
        weight = weight.contiguous()
        packed = pages.allocate(self.panels * self.panel * self.in_features, weight.dtype)
        self.library.tf_pack(
            self.dtype, weight.data_ptr(), self.out_features, self.in_features, packed.data_ptr()
        )
        return packed

    @functools.cached_property
    def struct(self) -> ctypes.Structure:
        """The layer as the kernels take it, made at the first product: a bias may have changed since the
        weights were packed.
        """
        if self.bias is None:
            return self.struct_with(None)
        self.biases = torch.zeros(self.panels * self.panel)  # the struct points there
        self.biases[: self.out_features] = self.bias.detach()
        return self.struct_with(self.biases.data_ptr())

    def struct_with(self, bias: int | None) -> ctypes.Structure:
        packed = None if self.packed is None else self.packed.data_ptr()
        sizes = self.in_features, self.out_features
        blocks = self.blocks or native.structs["Blocks"]()
        return native.structs["Linear"](packed, bias, *sizes, blocks, self.number)

    def product(self, rows: torch.Tensor, biased: bool) -> torch.Tensor:
        """Raises RuntimeError where the rows do not fit the weights, as torch's own does: the kernel would
        read past them.
        """
        if rows.shape[-1] != self.in_features or rows.dtype != self.weight_dtype:
            weights = f"weights [{self.out_features}, {self.in_features}] of another type or width"
            raise RuntimeError(f"{rows.dtype} rows {list(rows.shape)} cannot be multiplied with {weights}")
        rows = rows.contiguous()
        output = rows.new_empty(
            *rows.shape[:-1], self.out_features, dtype=torch.float32 if self.whole else None
        )
        num_rows = math.prod(rows.shape[:-1])
        shape = self.struct if biased else self.struct_with(None)
        pointers = (byref(shape), self.whole, output.data_ptr())
        self.library.tf_product(self.dtype, torch.get_num_threads(), rows.data_ptr(), num_rows, *pointers)
        return output


def can_round(dtype: torch.dtype) -> bool:
    """Whether rows of this dtype can be rounded to 8 bits (INT8_ACTIVATIONS)."""
    return bool((library := native.library()) and library.tf_rounds(native.TYPE_CODES[dtype]))


def pack_linears(model: Any, blocks: FindBlocks = no_blocks, rounds: bool = False) -> None:
    """Replace the plain linear layers of a model on CPU; `blocks` by their names, with the plain weights
    beside them where these are faster for many rows and memory has room for both. Logits are as exact as
    their sums: rounded to bfloat16, the two likeliest tokens are often equal. `rounds`: rows are rounded
    later, so plain weights are of no use.
    """
    head, pages = model.get_output_embeddings(), LargePages()
    num_bytes = sum(child.weight.nbytes for child in model.modules() if type(child) is nn.Linear)
    plain = not rounds and machine.available_bytes() >= num_bytes
    for path, module in list(model.named_modules()):
        for name, child in module.named_children():
            if type(child) is nn.Linear:
                own = blocks(f"{path}.{name}" if path else name)
                setattr(module, name, pack_linear(child, child is head, pages, own, plain))
    if store := WeightStore.inherited():
        pages.share(store)


def round_rows(model: nn.Module) -> None:
    """Have all products with blocks of integers round their rows to 8 bits, from now on. Layers are fused
    before: two codes of a layer would round some numbers to other neighbours.
    """
    for module in model.modules():
        if isinstance(module, NativeLinear):
            module.struct.blocks.rounds = True


def share_parameters(model: Any) -> None:
    """Share the parameters that a model on CPU computes with as they are, such as embeddings, with the other
    engines of the launcher. The weight files, whose pages they were, need no memory then.
    """
    if store := WeightStore.inherited():
        pages = LargePages()
        for parameter in model.parameters():
            parameter.data = pages.move(parameter.data)
        pages.share(store)


def pack_linear(
    linear: nn.Linear, whole: bool, pages: LargePages, blocks: Blocks | None = None, plain: bool = True
) -> nn.Module:
    """`blocks` and `plain` as in NativeLinear; without blocks, weights are always plain."""
    library, dtype = native.library(), linear.weight.dtype
    if library and linear.in_features % 2 == 0 and multiplies_correctly(library, dtype):
        blocks = blocks if blocks and blocks.are_in_turn and LARGEST_BLOCK % blocks.size == 0 else None
        plain &= library.tf_block_rows(native.TYPE_CODES[dtype]) < native.ANY_ROWS
        return NativeLinear(linear, library, whole, pages, blocks, plain or blocks is None)
    if torch.backends.mkldnn.is_available() and dtype in ONEDNN_DTYPES:  # type: ignore[no-untyped-call]
        return OneDnnLinear(linear)
    return linear


@functools.cache
def multiplies_correctly(library: ctypes.CDLL, dtype: torch.dtype) -> bool:
    """Whether the native library multiplies this type, and correctly, with the same bits from plain weights
    and from blocks, and near ones from rounded rows: its code distinguishes more processors than were
    available for tests.
    """
    if dtype not in native.TYPE_CODES or not library.tf_multiplies(native.TYPE_CODES[dtype]):
        return False
    random = torch.Generator().manual_seed(0)
    scales, offsets = (torch.randn(TRIAL_SIZE, 2, generator=random).half() for _ in range(2))
    rows = torch.randn(TRIAL_SIZE, TRIAL_SIZE, generator=random).to(dtype)
    signed = torch.randint(-128, 128, (TRIAL_SIZE, TRIAL_SIZE), generator=random)
    kinds = [
        Blocks((signed & 15).to(torch.uint8), scales / 8, offsets),
        Blocks(signed.to(torch.int8), scales / 128, None),
        Blocks((signed & 15).to(torch.uint8), scales.float(), None, torch.randn(16, generator=random)),
    ]
    off, are_right = 0.0, True
    for blocks in kinds:
        linear = nn.Linear(TRIAL_SIZE, TRIAL_SIZE, bias=False)
        linear.weight = nn.Parameter(blocks.widen(dtype), requires_grad=False)
        plain = NativeLinear(linear, library, True, LargePages())
        packed = NativeLinear(linear, library, True, LargePages(), blocks, plain=False)
        found = plain(rows)
        off = max(off, float((found - rows.float() @ linear.weight.float().T).abs().max()))
        are_right &= all(torch.equal(found[:count], packed(rows[:count])) for count in (1, 2, TRIAL_SIZE))
        packed.struct.blocks.rounds = True
        are_right &= bool((packed(rows) - found).abs().max() <= ROUNDED_ERROR)
    if off > TRIAL_ERROR or not are_right:
        log.error(
            "native products of %s are wrong on this processor (by %.2g): oneDNN's are used", dtype, off
        )
    return off <= TRIAL_ERROR and are_right
