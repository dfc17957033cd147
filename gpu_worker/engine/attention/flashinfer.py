"""Attention on CUDA, by FlashInfer: rows that decode by its XQA kernel, which takes all it needs from the
device, prompts by kernels that the host plans.
"""

import logging
import os
import shutil
import sysconfig
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Optional

import flashinfer
import numpy as np
import torch
from flashinfer.decode import xqa_batch_decode_with_kv_cache

from gpu_worker.engine.attention.kv_cache import AttentionSpec, Geometry
from gpu_worker.engine.attention.kv_write import write_kv
from gpu_worker.engine.batch.inputs import Inputs, Span, offsets_of
from gpu_worker.engine.batch.to_device import pinned, to_device

log = logging.getLogger(__name__)

DTYPES = (torch.bfloat16, torch.float16)
DIMS = (64, 128, 256)
PLAN_FREE_BLOCKS = (16, 32, 64, 128)
PLAN_FREE_GENERATIONS = (9, 10, 12)
"""Major compute capabilities that XQA is compiled for."""
PLAN_FREE_GROUP = 32
"""Query heads that share one K head: of more, one program's queries do not fit where it keeps them, if they
have 256 numbers.
"""
WORKSPACE_BYTES = 256 * 2**20
PLAN_FREE_BYTES = 16 * 2**20
"""8 MiB of counters, then what programs that share a row hand to each other: of each multiprocessor 32 heads
of 256 numbers at most.
"""
LOG2_E = 1.4426950408889634


def unsupported_because(geometry: Geometry) -> str:
    """Why FlashInfer has no attention for a model; empty where it has."""
    dims = sorted({dim for layer in geometry.layers for dim in (layer.key_dim, layer.value_dim)})
    if geometry.dtype not in DTYPES:
        return f"it has kernels for {listed(DTYPES)}, not for {geometry.dtype}"
    return (
        ""
        if len(dims) == 1 and dims[0] in DIMS
        else f"it has kernels for heads of {listed(DIMS)} numbers, these have {listed(dims)}"
    )


def plans_needed_because(geometry: Geometry, generation: int) -> str:
    """Why rows that decode need plans of the host, so that steps of such rows cannot be captured; empty where
    XQA serves them.
    """
    groups, caps = {spec.group for spec in geometry.specs}, {spec.softcap for spec in geometry.specs}
    if caps != {None}:
        return "scores are soft-capped"
    if max(groups) > PLAN_FREE_GROUP:
        return f"{max(groups)} query heads share a K head, more than {PLAN_FREE_GROUP}"
    if geometry.block_size not in PLAN_FREE_BLOCKS:
        return f"blocks have {geometry.block_size} tokens (BLOCK_SIZE), not {listed(PLAN_FREE_BLOCKS)}"
    return (
        ""
        if generation in PLAN_FREE_GENERATIONS
        else f"the GPU's compute capability is {generation}, not {listed(PLAN_FREE_GENERATIONS)}"
    )


def add_ninja_to_path() -> None:
    """FlashInfer compiles by ninja, which it brings and calls by name. It lies beside this interpreter, whose
    folder is in PATH only where the virtual environment was activated.
    """
    if shutil.which("ninja") is None:
        os.environ["PATH"] = os.pathsep.join(
            (os.environ.get("PATH", os.defpath), sysconfig.get_path("scripts"))
        )


def listed(values: Sequence[object]) -> str:
    return ", ".join(map(str, values))


@dataclass(frozen=True, slots=True)
class FlashInferStep:
    """
    Attributes:
        slots: int [tokens]
        table: int32 [rows, blocks]; of the rows at the front of the line that decode without a plan.
        lengths: int32 [rows]
    """

    slots: torch.Tensor
    table: torch.Tensor
    lengths: torch.Tensor


class FlashInferBackend:
    """Pages are `[kv_heads, block_size, dim]`, FlashInfer's HND.

    Attributes:
        plan_free: whether a step in which all rows decode needs nothing from the host but its tokens and
            tables.
    """

    compilable = True

    def __init__(self, geometry: Geometry, device: torch.device, generation: int) -> None:
        if device.type == "cuda":
            add_ninja_to_path()
        self.block_size, self.dtype, self.device = geometry.block_size, geometry.dtype, device
        self.dim, self.specs = geometry.layers[0].key_dim, geometry.specs
        why = plans_needed_because(geometry, generation)
        self.plan_free = not why
        if why:
            log.warning("FlashInfer plans each step that decodes, which is slower: %s", why)
        self.workspace = torch.zeros(
            PLAN_FREE_BYTES, dtype=torch.uint8, device=device
        )  # XQA's counters start at zero
        scratch = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        # A plan lies in its wrapper's pinned memory until the device has taken it: one may wait there while
        # the next one is made.
        self.wrappers = [
            [flashinfer.BatchPrefillWithPagedKVCacheWrapper(scratch, "HND") for _ in self.specs]
            for _ in range(2)
        ]
        self.taken = [torch.cuda.Event() for _ in self.wrappers] if device.type == "cuda" else []  # type: ignore[no-untyped-call]
        self.turn, self.modules = 0, list[Any]()
        self.step = self.rows_that_decode(
            torch.zeros(1, dtype=torch.int32, device=device),
            torch.zeros(1, 1, dtype=torch.int32, device=device),
        )
        self.number = max(BACKENDS, default=0) + 1
        BACKENDS[self.number] = self

    # --- before a forward ---

    def begin(self, inputs: Inputs) -> None:
        first = (
            next((place for place, span in enumerate(inputs.spans) if span.count > 1), len(inputs.spans))
            if self.plan_free
            else 0
        )
        table, lengths = table_of(inputs.spans[:first])
        self.step = FlashInferStep(
            to_device(inputs.slots, self.device),
            to_device(table, self.device),
            to_device(lengths, self.device),
        )
        if first < len(inputs.spans):
            self.turn = 1 - self.turn
            self.plan(inputs.spans[first:])

    def begin_decode(self, positions: torch.Tensor, table: torch.Tensor) -> None:
        """As `begin`, for rows that all decode, from tensors on the device: positions int32 [rows], table
        int32 [rows, blocks].
        """
        self.step = self.rows_that_decode(positions, table)

    def rows_that_decode(self, positions: torch.Tensor, table: torch.Tensor) -> FlashInferStep:
        blocks = table.gather(1, (positions // self.block_size).long()[:, None])[:, 0]
        return FlashInferStep(blocks * self.block_size + positions % self.block_size, table, positions + 1)

    def plan(self, spans: Sequence[Span]) -> None:
        counts = np.concatenate([np.full(len(span.lengths), span.count) for span in spans])
        lengths = np.concatenate([span.lengths for span in spans])
        held = -(-lengths // self.block_size)
        lines = (line for span in spans for line in span.blocks)
        blocks = np.concatenate([line[:count] for line, count in zip(lines, held, strict=True)])
        last_lengths, longest = lengths - (held - 1) * self.block_size, int(counts.max())
        host = (offsets_of(counts), offsets_of(held), last_lengths, lengths)
        query_ends, block_ends, last_lengths, totals = (
            pinned(values.astype(np.int32), self.device) for values in host
        )
        indices = to_device(blocks.astype(np.int32), self.device)
        if self.taken:
            self.taken[self.turn].synchronize()
        for spec, wrapper in zip(self.specs, self.wrappers[self.turn], strict=True):
            wrapper.plan(
                query_ends,
                block_ends,
                indices,
                last_lengths,
                spec.kv_heads * spec.group,
                spec.kv_heads,
                self.dim,
                self.block_size,
                causal=True,
                sm_scale=spec.scaling,
                window_left=window_left(spec),
                logits_soft_cap=spec.softcap,
                q_data_type=self.dtype,
                kv_data_type=self.dtype,
                seq_lens=totals,  # or FlashInfer computes them, in memory that is not pinned
                max_token_per_sequence=longest,  # or it looks for it, number by number
            )
        if self.taken:
            self.taken[self.turn].record()

    # --- in a forward ---

    def attend(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        output: torch.Tensor = attend(query, key, value, sinks, module.layer, self.number)
        return output

    def run(
        self,
        number: int,
        query: torch.Tensor,
        cache: tuple[torch.Tensor, torch.Tensor],
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """query [tokens, heads, dim] → the same shape"""
        rows, output = len(self.step.lengths), torch.empty_like(query)
        if rows:
            self.decode(self.specs[number], query[:rows], cache, sinks, output[:rows])
        if rows < len(query):
            self.prefill(self.wrappers[self.turn][number], query[rows:], cache, sinks, output[rows:])
        return output

    def decode(
        self,
        spec: AttentionSpec,
        query: torch.Tensor,
        cache: tuple[torch.Tensor, torch.Tensor],
        sinks: Any,
        output: torch.Tensor,
    ) -> None:
        xqa_batch_decode_with_kv_cache(
            query,
            cache,
            self.workspace,
            self.step.table,
            self.step.lengths,
            self.step.table.shape[1] * self.block_size,
            bmm1_scale=spec.scaling,
            window_left=window_left(spec),
            out=output,
            sinks=sinks,
            kv_layout="HND",
        )

    def prefill(
        self,
        wrapper: Any,
        query: torch.Tensor,
        cache: tuple[torch.Tensor, torch.Tensor],
        sinks: Any,
        output: torch.Tensor,
    ) -> None:
        """A sink takes its share of a softmax whose sum is known: what is left of the output is `sigmoid(log
        sum - sink)`.
        """
        if sinks is None:
            wrapper.run(query, cache, out=output)
        else:
            _, log2_sum = wrapper.run(query, cache, out=output, return_lse=True)
            output.mul_(torch.sigmoid(log2_sum / LOG2_E - sinks)[..., None])


def window_left(spec: AttentionSpec) -> int:
    return -1 if spec.window is None else spec.window - 1


def table_of(spans: Sequence[Span]) -> tuple[Any, Any]:
    """→ blocks int32 [rows, blocks], lengths int32 [rows]"""
    width = max((span.blocks.shape[1] for span in spans), default=1)
    tables = [np.pad(span.blocks, ((0, 0), (0, width - span.blocks.shape[1]))) for span in spans]
    lengths = [span.lengths for span in spans]
    return np.concatenate([np.zeros((0, width)), *tables]).astype(np.int32), np.concatenate(
        [np.zeros(0), *lengths]
    ).astype(np.int32)


# --- what a compiled layer calls ----------------------------------------------------------------------------

BACKENDS: weakref.WeakValueDictionary[int, FlashInferBackend] = weakref.WeakValueDictionary()
"""By number: compiled code takes tensors and numbers only."""


@torch.library.custom_op("tokenfleet::attend", mutates_args=())
def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: Optional[torch.Tensor],  # noqa: UP045  (schemas are read from annotations)
    layer: torch.Tensor,
    backend: int,
) -> torch.Tensor:
    """`layer` is a number on the host, as a tensor: a plain number would make each layer compile for itself.
    The cache is not among the arguments: compilers copy what is written to, and take views of one tensor for
    one thing.
    """
    flash = BACKENDS[backend]
    module = flash.modules[int(layer)]
    keys, values = module.keys, module.values
    write_kv(keys, values, key[0], value[0], flash.step.slots)
    sinks = None if sinks is None else sinks.float()
    return flash.run(module.spec_number, query[0].transpose(0, 1).contiguous(), (keys, values), sinks)[None]


@attend.register_fake
def shape_of(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any) -> torch.Tensor:
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])
