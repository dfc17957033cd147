"""LoRA adapters of the linear layers that native kernels multiply (kernels/adapters.h): on top of a layer's
product, or within fused layers.
"""

import ctypes
import math
from collections.abc import Mapping, Sequence
from ctypes import addressof, byref
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from gpu_worker.engine.adapters.weights import LowRankPair
from gpu_worker.engine.batch.adapters import AdaptedStep, AdaptedTokens
from gpu_worker.engine.cpu import native

RANKS = 4
"""Ranks are multiples of it, as in kernels/adapters.h."""
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


class NativeAdapters:
    """The adapters on the device: matrices by slot and layer.

    Attributes:
        tokens, kept: of the step that runs: all tokens, and those whose logits are needed; None if none has
            an adapter.
        placed: by slot, by layer; the kernels' table points into these.
        ranks: int32 [slots, layers]
    """

    def __init__(self, linears: Sequence[Any], num_slots: int) -> None:
        self.library: ctypes.CDLL = linears[0].library
        self.linears = linears
        self.num_linears = len(linears)
        for number, linear in enumerate(linears):
            linear.number = number
            linear.adapters = self
        self.matrices = (native.LowRankStruct * (num_slots * self.num_linears))()
        self.placed: list[Mapping[Any, LowRankPair]] = [{} for _ in range(num_slots)]
        self.ranks = np.zeros((num_slots, self.num_linears), np.int32)
        self.tokens: PreparedTokens | None = None
        self.kept: PreparedTokens | None = None

    def pack(self, linear: Any, down: torch.Tensor, up: torch.Tensor) -> LowRankPair:
        """down [rank, inputs] and up [outputs, rank], float32"""
        spare_ranks = -len(down) % RANKS
        spare_outputs = linear.panels * linear.panel - len(up)
        down = functional.pad(down, (0, 0, 0, spare_ranks))
        up = functional.pad(up, (0, spare_ranks, 0, spare_outputs))
        panels = up.view(linear.panels, linear.panel, -1).transpose(1, 2)
        return LowRankPair(
            down.to(linear.weight_dtype).contiguous(), panels.to(linear.weight_dtype).contiguous()
        )

    def place(self, slot: int, pairs: Mapping[Any, Any]) -> None:
        """Put an adapter's matrices, by layers, in place of what the slot had; those of others are not looked
        at.
        """
        self.placed[slot] = {linear: pairs[linear] for linear in self.linears if linear in pairs}
        for number, linear in enumerate(self.linears):
            pair = self.placed[slot].get(linear)
            self.ranks[slot, number] = len(pair.down) if pair else 0
            found = (pair.down.data_ptr(), pair.up.data_ptr(), len(pair.down)) if pair else (None, None, 0)
            self.matrices[slot * self.num_linears + number] = native.LowRankStruct(*found)

    def prepare(self, step: AdaptedStep | None) -> None:
        """Set the step that runs."""
        self.tokens = self.kept = None
        if step:
            ranks = self.ranks[[slot for slot, *_ in step.tokens.groups]].max(0, initial=0)
            used, max_rank = (ranks > 0).astype(np.uint8), int(ranks.max())
            self.tokens = PreparedTokens(step.tokens, self.matrices, used, max_rank)
            self.kept = PreparedTokens(step.kept, self.matrices, used, max_rank)

    @property
    def address(self) -> int | None:
        """Of what fused layers read; None if no token of the step has an adapter."""
        return addressof(self.tokens.struct) if self.tokens else None

    def add(self, linear: Any, rows: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """Add to `output` [..., outputs], of the layer's dtype or float32, what the adapters of `rows` [...,
        inputs] give.
        """
        prepared = self.kept if linear.is_head else self.tokens
        if prepared is None or not prepared.used[linear.number]:
            return output
        rows, num_rows = rows.contiguous(), math.prod(rows.shape[:-1])
        check_rows(num_rows, len(prepared.arrays[2]))
        threads, shape = torch.get_num_threads(), byref(linear.struct)
        pointers = (byref(prepared.struct), linear.whole, output.data_ptr())
        self.library.tf_adapt(linear.dtype, threads, rows.data_ptr(), num_rows, shape, *pointers)
        return output


def check_rows(num_rows: int, num_tokens: int) -> None:
    """Raises RuntimeError if a layer is not called with the tokens of the step, one after the other."""
    if num_rows != num_tokens:
        raise RuntimeError(f"a layer with adapters got {num_rows} rows in a step of {num_tokens} tokens")
