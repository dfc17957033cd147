"""Attention on CUDA, by FlashInfer. Rows that decode use its XQA kernel, which takes all it needs from the
device. Prompts, and layers that XQA does not serve, use kernels that the host plans.

Shapes of `attend`: query [1, heads, tokens, dim], key and value [1, kv_heads, tokens, dim], sinks [heads],
all of the model's dtype; layer int64 [] → [1, tokens, heads, dim].
"""

import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch
from flashinfer import xqa
from torch.nn.functional import pad

from gpu_worker.engine.attention.flashinfer_inputs import (
    FlashInferStep,
    scratch_bytes,
    splits_rows,
    table_of,
    told_processors,
)
from gpu_worker.engine.attention.flashinfer_plans import (
    DecodePlans,
    StepPlans,
    make_workspace,
    processors_of,
)
from gpu_worker.engine.attention.flashinfer_support import (
    add_ninja_to_path,
    plans_needed_because,
    with_padded_heads,
)
from gpu_worker.engine.attention.kv_cache import Geometry, write_kv
from gpu_worker.engine.batch.inputs import Inputs, to_device
from gpu_worker.engine.batch.step_result import Int32

log = logging.getLogger(__name__)

COUNTERS_BYTES = 8 * 2**20
"""XQA's counters of programs that share a row; it leaves them at zero."""
ALIGNMENT = 1024


class FlashInferBackend:
    """Attention by FlashInfer. Pages are `[kv_heads, block_size, dim]`, FlashInfer's HND.

    Heads smaller than those of FlashInfer's kernels are padded with zeros, which add nothing to scores;
    outputs are cut to the size again.

    Tensors, all float16 or bfloat16 but for the scores: query and output [tokens, heads, dim]; the cache,
    which may hold 8-bit floats, is a pair of K and V, each [blocks, kv_heads, block_size, dim]; sinks float32
    [heads].

    Attributes:
        planned: by view, whether rows that decode need plans.
        split_heads: K heads of the views whose rows may be split for the sake of a long one, of the rank
            that has fewest; 0 where there are none.
        split_processors: of the rank whose card has fewest.
        decoders: in a captured step, by view, what computes rows that decode; None is XQA.
    """

    capturable = True
    compilable = True

    def __init__(
        self, geometry: Geometry, device: torch.device, generation: int, max_rows: int, max_blocks: int
    ) -> None:
        if device.type == "cuda":
            add_ninja_to_path()
        self.geometry = geometry = with_padded_heads(geometry)
        self.block_size = geometry.block_size
        self.device = device
        self.views = geometry.views
        reasons = [plans_needed_because(geometry, view.spec, generation) for view in self.views]
        self.planned = [bool(why) for why in reasons]
        self.plan_free = not any(reasons)
        for why in dict.fromkeys(filter(None, reasons)):
            log.warning("FlashInfer plans each step that decodes, which is slower: %s", why)
        self.processors = processors_of(device)
        split = [view.spec.kv_heads for view in self.views if view.spec.window is None]
        self.split_heads = max(split, default=0) if self.plan_free else 0
        self.split_processors = self.processors
        self.counters = torch.zeros(COUNTERS_BYTES, dtype=torch.uint8, device=device)
        self.scratch = torch.empty(self.scratch_bytes(max_rows), dtype=torch.uint8, device=device)
        scratch = make_workspace(geometry, device, max_rows)
        self.plans = StepPlans(geometry, self.planned, scratch, generation)
        self.decode_plans = DecodePlans(geometry, self.planned, scratch, generation, max_rows, max_blocks)
        self.decoders: list[Any] = [None] * len(self.views)
        self.modules: list[Any] = []
        self.step = self.rows_that_decode(
            torch.zeros(1, dtype=torch.int32, device=device),
            torch.zeros(1, 1, dtype=torch.int32, device=device),
        )
        self.number = max(BACKENDS, default=0) + 1
        BACKENDS[self.number] = self

    # --- before a forward ---

    def scratch_bytes(self, max_rows: int) -> int:
        views = (view for view, planned in zip(self.views, self.planned, strict=True) if not planned)
        sizes = (
            scratch_bytes(max_rows, view.spec.kv_heads, view.spec.group, view.value_dim, self.processors)
            for view in views
        )
        return max(sizes, default=0) + ALIGNMENT

    def take_pages(self) -> None:
        """Nothing is kept of a cache."""

    def prepare_forward(self, inputs: Inputs) -> None:
        first = next((place for place, span in enumerate(inputs.spans) if span.count > 1), len(inputs.spans))
        table, lengths = table_of(inputs.spans[:first])
        self.step = FlashInferStep(
            to_device(inputs.slots, self.device),
            to_device(table, self.device),
            to_device(lengths, self.device),
            self.splits_rows(lengths),
        )
        self.decoders = [None] * len(self.views)
        self.plans.plan(inputs.spans, first)

    def splits_rows(self, lengths: Int32) -> bool:
        """Whether rows that decode are split for the sake of a long one: lengths int [rows] in the cache."""
        shape = (self.split_heads, self.split_processors)
        return bool(self.split_heads and len(lengths) and splits_rows(lengths, *shape))

    def agree(self, smallest: Callable[[int], int]) -> None:
        """Split the rows of the same steps on all ranks: steps that are split have graphs of other sizes, and
        a sum over ranks must have one size. Ranks may have different numbers of K heads. `smallest`: the
        least number of all ranks.
        """
        self.split_heads, self.split_processors = smallest(self.split_heads), smallest(self.processors)

    def plan_decode(self, positions: Int32, table: Int32) -> None:
        """Prepare a `prepare_decode`: positions int32 [rows], table int32 [rows, blocks]."""
        if not self.plan_free:
            self.decode_plans.plan(positions, table)

    def prepare_decode(self, positions: torch.Tensor, table: torch.Tensor, is_split: bool = False) -> None:
        """Prepare a forward of rows that all decode and are planned, from tensors on the device: positions
        int32 [rows], table int32 [rows, blocks]. `is_split`: rows are split.
        """
        self.step = self.rows_that_decode(positions, table, is_split)
        wrappers = self.decode_plans.wrappers.get(len(positions), {})
        self.decoders = [wrappers.get(view) for view in self.views]

    def rows_that_decode(
        self, positions: torch.Tensor, table: torch.Tensor, is_split: bool = False
    ) -> FlashInferStep:
        blocks = table.gather(1, (positions // self.block_size).long()[:, None])[:, 0]
        slots = blocks * self.block_size + positions % self.block_size
        return FlashInferStep(slots, table, positions + 1, is_split)

    # --- in a forward ---

    def attend(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        dim = value.shape[3]
        if dim < module.kept_dim:  # here, where a compiler fuses it with what made these
            query, key, value = (pad(tensor, (0, module.kept_dim - dim)) for tensor in (query, key, value))
        output: torch.Tensor = attend(query, key, value, sinks, module.layer, self.number)
        return output[..., :dim]

    def run(self, module: Any, query: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
        """query [tokens, heads, dim] → [tokens, heads, value_dim], both of the model's dtype"""
        number = module.view_number
        output = query.new_empty(*query.shape[:2], module.values.shape[3])
        if decoder := self.decoders[number]:
            decoder.run(module, query, sinks, output)
            return output
        rows = 0 if self.planned[number] else len(self.step.lengths)
        if rows:
            self.decode(module, query[:rows], sinks, output[:rows])
        if rows < len(query):
            self.plans.wrappers[number].run(module, query[rows:], sinks, output[rows:])
        return output

    def decode(self, module: Any, query: torch.Tensor, sinks: Any, output: torch.Tensor) -> None:
        """XQA multiplies scores by both scales and its root of `dim`, outputs by that of V."""
        spec, step = module.spec, self.step
        is_split = step.is_split and spec.window is None
        xqa(
            query[:, None],
            module.keys,
            module.values,
            step.table,
            step.lengths[:, None],
            output[:, None],
            self.scratch,
            self.counters,
            spec.kv_heads,
            self.block_size,
            sinks=None if sinks is None else sinks.view(spec.kv_heads, spec.group),
            q_scale=spec.scaling * module.key_scale / module.value_scale * query.shape[2] ** 0.5,
            kv_scale=module.value_scale,
            sliding_win_size=spec.window or 0,
            kv_layout="HND",
            sm_count=told_processors(len(query), spec.kv_heads, self.processors, is_split),
        )


# --- what a compiled layer calls ----------------------------------------------------------------------------

BACKENDS: weakref.WeakValueDictionary[int, FlashInferBackend] = weakref.WeakValueDictionary()
"""By number: compiled code takes tensors and numbers only."""


OPERATORS = torch.library.Library("tokenfleet", "FRAGMENT")  # type: ignore[no-untyped-call]
OPERATORS.define(  # type: ignore[no-untyped-call]
    "attend(Tensor query, Tensor key, Tensor value, Tensor? sinks, Tensor layer, int backend) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
"""By itself `torch.library.custom_op` would compare all tensors' memory at each call, on the host's time."""


@torch.library.impl(OPERATORS, "attend", "CompositeExplicitAutograd")
def attend_layer(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    layer: torch.Tensor,
    backend: int,
) -> torch.Tensor:
    """query [1, heads, tokens, dim], key and value [1, kv_heads, tokens, dim], sinks [heads], all of the
    model's dtype → [1, tokens, heads, dim]. `layer`, int64 [], lies on the host: a plain number would make
    each layer compile for itself. The cache is not among the arguments: compilers copy what is written to,
    and take views of one tensor for one thing.
    """
    flash = BACKENDS[backend]
    module = flash.modules[int(layer)]
    scales = (module.key_scale, module.value_scale)
    write_kv(module.keys, module.values, key[0], value[0], flash.step.slots, scales)
    sinks = None if sinks is None else sinks.float()
    return flash.run(module, query[0].transpose(0, 1).contiguous(), sinks)[None]


@torch.library.register_fake("tokenfleet::attend", lib=OPERATORS)  # type: ignore[untyped-decorator]
def shape_of(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any) -> torch.Tensor:
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])


attend = torch.ops.tokenfleet.attend.default
