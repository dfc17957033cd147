"""Linear layers whose weights lie as the processor's matrix product wants them, packed once at load."""

import ctypes
import functools
import logging
import math
from collections.abc import Callable, Mapping
from ctypes import byref
from typing import Any

import torch
from torch import nn

from common.process import memory
from gpu_worker.engine.blocks import Blocks
from gpu_worker.engine.cpu import native
from gpu_worker.engine.cpu.large_pages import LargePages
from gpu_worker.engine.cpu.packed_blocks import pack_blocks

log = logging.getLogger(__name__)

ROWS = 32  # the number of rows that oneDNN's layout is chosen for; any number works
TYPES = (torch.float32, torch.bfloat16)
TRIAL_SIZE = 64
TRIAL_ERROR = 1e-3  # of sums of as many products of normal numbers; a wrong one is off by 8


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
        """[out_features, in_features], computed back by a product with ones: some models look at the
        weights of their routers.
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
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), ROWS)

    def product(self, rows: torch.Tensor, biased: bool) -> Any:
        return torch.ops.mkldnn._linear_pointwise(
            rows, self.packed, self.bias if biased else None, "none", [], ""
        )


class NativeLinear(PackedLinear):
    """Multiplies rows [..., in_features] of the weights' dtype by the native kernels: a row's result depends
    on no other row. `whole`: its outputs are float32, whatever the weights are. `blocks`: the same weights in
    blocks, which few rows are multiplied with; all are, without `plain` weights. The bits of a result are the
    same.
    """

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
        self.panels = -(-self.out_features // library.tf_panel())
        self.blocks = blocks and pack_blocks(blocks, library.tf_panel(), pages)
        self.packed = self.pack(linear.weight.detach(), pages) if plain else None

    def pack(self, weight: torch.Tensor, pages: LargePages) -> torch.Tensor:
        weight = weight.contiguous()
        packed = pages.allocate(self.panels * self.library.tf_panel() * self.in_features, weight.dtype)
        self.library.tf_pack(
            self.dtype, weight.data_ptr(), self.out_features, self.in_features, packed.data_ptr()
        )
        return packed

    @functools.cached_property
    def struct(self) -> native.LinearStruct:
        """The layer as the kernels take it, made at the first product: a bias may have changed since the
        weights were packed.
        """
        if self.bias is None:
            return self.struct_with(None)
        self.biases = torch.zeros(self.panels * self.library.tf_panel())  # the struct points there
        self.biases[: self.out_features] = self.bias.detach()
        return self.struct_with(self.biases.data_ptr())

    def struct_with(self, bias: int | None) -> native.LinearStruct:
        blocks = self.blocks.struct if self.blocks else native.BlocksStruct()
        packed = None if self.packed is None else self.packed.data_ptr()
        return native.LinearStruct(packed, bias, self.in_features, self.out_features, blocks)

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


def pack_linears(model: Any, blocks: Mapping[str, Blocks]) -> None:
    """Replace the plain linear layers of a model on CPU; `blocks` by their names, with the plain weights
    beside them where memory has room for both. Logits are as exact as their sums: rounded to bfloat16, the
    two likeliest tokens are often equal.
    """
    head, pages = model.get_output_embeddings(), LargePages()
    num_bytes = sum(child.weight.nbytes for child in model.modules() if type(child) is nn.Linear)
    plain = memory.available_bytes() >= num_bytes
    for path, module in list(model.named_modules()):
        for name, child in module.named_children():
            if type(child) is nn.Linear:
                own = blocks.get(f"{path}.{name}" if path else name)
                setattr(module, name, pack_linear(child, child is head, pages, own, plain))


def pack_linear(
    linear: nn.Linear, whole: bool, pages: LargePages, blocks: Blocks | None = None, plain: bool = True
) -> nn.Module:
    """`blocks` and `plain` as in NativeLinear; without blocks, weights are always plain."""
    library, dtype = native.library(), linear.weight.dtype
    if library and linear.in_features % 2 == 0 and multiplies_correctly(library, dtype):
        if blocks and not (dtype == torch.bfloat16 and expands_correctly(library)):
            blocks = None
        return NativeLinear(linear, library, whole, pages, blocks, plain or blocks is None)
    if torch.backends.mkldnn.is_available() and dtype in TYPES:  # type: ignore[no-untyped-call]
        return OneDnnLinear(linear)
    return linear


@functools.cache
def multiplies_correctly(library: ctypes.CDLL, dtype: torch.dtype) -> bool:
    """Whether the native library multiplies this type, and correctly: its code distinguishes more processors
    than were available for tests.
    """
    if dtype not in native.TYPE_CODES or not library.tf_multiplies(native.TYPE_CODES[dtype]):
        return False
    random = torch.Generator().manual_seed(0)
    linear = nn.Linear(TRIAL_SIZE, TRIAL_SIZE, bias=False)
    rows, weight = (torch.randn(TRIAL_SIZE, TRIAL_SIZE, generator=random).to(dtype) for _ in range(2))
    linear.weight = nn.Parameter(weight, requires_grad=False)
    off = (
        (NativeLinear(linear, library, True, LargePages())(rows) - rows.float() @ weight.float().T)
        .abs()
        .max()
    )
    if off > TRIAL_ERROR:
        log.error(
            "native products of %s are wrong on this processor (by %.2g): oneDNN's are used", dtype, off
        )
    return bool(off <= TRIAL_ERROR)


@functools.cache
def expands_correctly(library: ctypes.CDLL) -> bool:
    """Whether the native library computes the bits of plain weights from those in blocks."""
    random = torch.Generator().manual_seed(0)
    scales, offsets = (torch.randn(TRIAL_SIZE, 2, generator=random).half() for _ in range(2))
    rows = torch.randn(TRIAL_SIZE, TRIAL_SIZE, generator=random).bfloat16()
    signed = torch.randint(-128, 128, (TRIAL_SIZE, TRIAL_SIZE), generator=random)
    kinds = [
        Blocks((signed & 15).to(torch.uint8), scales, offsets),
        Blocks(signed.to(torch.int8), scales, None),
    ]
    correct = True
    for blocks in kinds:
        linear = nn.Linear(TRIAL_SIZE, TRIAL_SIZE, bias=False)
        linear.weight = nn.Parameter(blocks.widen(), requires_grad=False)
        plain = NativeLinear(linear, library, True, LargePages())
        packed = NativeLinear(linear, library, True, LargePages(), blocks, plain=False)
        correct &= all(torch.equal(plain(rows[:count]), packed(rows[:count])) for count in (1, 2, TRIAL_SIZE))
    if not correct:
        log.error("weights in blocks are expanded wrongly on this processor: they are widened at load")
    return correct
