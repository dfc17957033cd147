"""Attention on CUDA, by FlashInfer: the inputs of its kernels, the plans that some need, and the backend.

Rows that decode use its XQA kernel, which takes all it needs from the device. Prompts, and layers that XQA
does not serve, use kernels that the host plans before the step is launched.

By itself XQA splits the rows of a step as far as processors are idle, whatever the rows' lengths: a long row
beside many short ones is one program for each K head, and all other rows wait for it; and the parts of few
short rows are empty, but must be merged. It is told another number of processors.

Shapes of `attend`: query [1, heads, tokens, dim], key and value [1, kv_heads, tokens, dim], sinks [heads],
all of the model's dtype; layer int64 [] → [1, tokens, heads, dim].
"""

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import flashinfer
import numpy as np
import numpy.typing as npt
import torch
from flashinfer import xqa
from flashinfer.mla import BatchMLAPagedAttentionWrapper, MLAPlanMetadata
from torch.nn.functional import pad

from common.settings.settings import SettingError
from gpu_worker.engine.attention.backend import AttentionBackend, Geometry, LayerSpec, write_kv
from gpu_worker.engine.attention.flashinfer_support import (
    add_ninja_to_path,
    latent_kernel,
    planned_heads,
    plans_needed_because,
    with_padded_heads,
    workspace_bytes,
)
from gpu_worker.engine.batch.inputs import Inputs, RowTable, offsets_of, pinned, to_device
from gpu_worker.engine.batch.step_result import Int32, Int64

OWN_PARTS = 4
"""Most parts of a row in other steps: on an H200, 16 took a row of 500 tokens twice as long as 2."""
SPLIT_PARTS = 8
"""Least parts of a row in a step that is split."""
TILE_KEYS = 256
"""Keys that a program of XQA reads at once."""
EMPTY_PART = 0.5
"""The cost of each part, in tiles, even if it is empty: results of parts are merged."""
MERGED_PARTS = 3.0
"""The time of merging more than OWN_PARTS, in tiles."""
MAX_SPLIT_SHARE = 0.75
"""Rows are split if a step is expected to take at most this share of its time without."""


def splits_rows(lengths: npt.NDArray[np.integer], kv_heads: int, processors: int) -> bool:
    """Whether a step takes less time with its rows in more parts: lengths int [rows] in the cache, of each
    rank's K heads.
    """
    tiles = -(-lengths // TILE_KEYS)
    own, split = (
        expected_tiles(
            tiles, parts_of_rows(len(lengths), kv_heads, processors, is_split), kv_heads, processors
        )
        for is_split in (False, True)
    )
    return split <= MAX_SPLIT_SHARE * own


def parts_of_rows(rows: int, kv_heads: int, processors: int, is_split: bool) -> int:
    """Into how many parts each row is split, at most: XQA makes no more than a row's table has tiles."""
    idle = processors // (rows * kv_heads)
    return max(SPLIT_PARTS, idle) if is_split else max(1, min(OWN_PARTS, idle))


def expected_tiles(tiles: npt.NDArray[np.integer], parts: int, kv_heads: int, processors: int) -> float:
    """The time of a step in tiles: of its longest program, or of all programs on all processors. tiles int
    [rows]
    """
    costs = 0.0 if parts == 1 else EMPTY_PART * parts * len(tiles)
    merged = MERGED_PARTS if parts > OWN_PARTS else 0.0
    longest = -(-int(tiles.max()) // parts)
    return max(longest, (int(tiles.sum()) + costs) * kv_heads / processors) + merged


def told_processors(rows: int, kv_heads: int, processors: int, is_split: bool) -> int:
    """The number of processors that XQA is told: it splits rows by it."""
    return parts_of_rows(rows, kv_heads, processors, is_split) * rows * kv_heads


def scratch_bytes(rows: int, kv_heads: int, group: int, dim: int, processors: int) -> int:
    """What programs that share a row hand to each other: of each query 16-bit outputs, and of up to 32
    queries the largest score and the sum of the softmax in float32.
    """
    programs = max(processors, SPLIT_PARTS * rows * kv_heads)
    return programs * (group * dim * 2 + 2 * 32 * 4 * -(-group // 32))


@dataclass(frozen=True, slots=True)
class FlashInferStep:
    """A step's inputs that all layers share.

    Attributes:
        slots: int [tokens]
        table: int32 [rows, blocks]; of the first rows of the step, which decode without a plan.
        lengths: int32 [rows]
        is_split: rows are split into SPLIT_PARTS.
    """

    slots: torch.Tensor
    table: torch.Tensor
    lengths: torch.Tensor
    is_split: bool = False


class PlanInputs(NamedTuple):
    """What a plan needs of its rows: int32 tensors, `blocks` on the device, the others pinned on the host,
    since FlashInfer would copy other tensors and wait for that.

    Attributes:
        query_ends: where each row's tokens begin, and the last one's end.
        block_ends: where each row's blocks begin, and the last one's end.
        last_lengths: tokens in each row's last block.
        lengths: tokens of each row in the cache.
        blocks: of all rows, one after the other.
        longest: the most tokens of a row in this step.
        schedules: of captured steps, by view that needs plans, uint8 [SCHEDULE_BYTES].
    """

    query_ends: torch.Tensor
    block_ends: torch.Tensor
    last_lengths: torch.Tensor
    lengths: torch.Tensor
    blocks: torch.Tensor
    longest: int
    schedules: Mapping[LayerSpec, torch.Tensor] = {}

    @property
    def latent_metadata(self) -> dict[str, torch.Tensor]:
        """→ int32 [rows + 1], [rows + 1], [blocks], [rows], by FlashInfer's names"""
        names = ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")
        return dict(zip(names, (self.query_ends, self.block_ends, self.blocks, self.lengths), strict=True))

    def of_rows(self, rows: int) -> "PlanInputs":
        """The part for so many rows."""
        return self._replace(
            query_ends=self.query_ends[: rows + 1],
            block_ends=self.block_ends[: rows + 1],
            last_lengths=self.last_lengths[:rows],
            lengths=self.lengths[:rows],
        )


def plan_inputs(
    counts: Int64, lengths: Int64, blocks: Int32, block_size: int, device: torch.device
) -> PlanInputs:
    """What a plan for rows needs, int64 [rows]: their tokens in this step, and in the cache; blocks int32
    [blocks] of all rows.
    """
    held = -(-lengths // block_size)
    on_host = offsets_of(counts), offsets_of(held), lengths - (held - 1) * block_size, lengths
    query_ends, block_ends, last_lengths, kv_lens = (pinned(own, device, torch.int32) for own in on_host)
    on_device = to_device(blocks, device, torch.int32)
    return PlanInputs(query_ends, block_ends, last_lengths, kv_lens, on_device, int(counts.max()))


def empty_inputs(
    rows: int, num_blocks: int, schedules: Mapping[LayerSpec, torch.Tensor], device: torch.device
) -> PlanInputs:
    """Room on the device for the inputs of `rows` rows that decode and have `num_blocks` blocks together."""
    query_ends, block_ends, last_lengths, lengths, blocks = (
        torch.zeros(size, dtype=torch.int32, device=device)
        for size in (rows + 1, rows + 1, rows, rows, num_blocks)
    )
    return PlanInputs(query_ends, block_ends, last_lengths, lengths, blocks, 1, schedules)


LOG2_E = 1.4426950408889634
MAX_TILES = 16_384
"""Tiles of a step over latents that FlashInfer has room for, of 128 queries each, some for parts of long
rows. Its own refusal would name no setting.
"""
SPLIT_TILES = 512
"""Tiles that FlashInfer may need for parts of long rows."""
SCHEDULE_BYTES = 2**20
"""Of a captured step: about 20 bytes for each row, and for each program of the kernel."""


class PagePlan:
    """Kernels over pages, planned for the rows of a step. Those of captured steps, all of whose rows decode,
    use tensor cores: FlashInfer's other kernel serves few numbers of queries that share a K head. Query and
    output [tokens, heads, dim] of the model's dtype, sinks float32 [heads].
    """

    def __init__(
        self,
        geometry: Geometry,
        view: LayerSpec,
        workspace: torch.Tensor,
        generation: int,
        buffers: PlanInputs | None = None,
    ) -> None:
        """workspace uint8 [bytes]; `buffers` are what the graph of a captured step reads."""
        self.is_captured = buffers is not None
        self.options = {
            "num_qo_heads": view.kv_heads * view.group,
            "num_kv_heads": view.kv_heads,
            "page_size": geometry.block_size,
            "sm_scale": view.scaling,
            "window_left": -1 if view.window is None else view.window - 1,  # keys before a query's own
            "logits_soft_cap": view.softcap,
            "q_data_type": geometry.dtype,
            "kv_data_type": geometry.kv_dtype,
        }
        self.dim = view.key_dim
        if buffers is None:
            self.wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
            return
        self.wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace,
            "HND",
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=buffers.block_ends,
            paged_kv_indices_buffer=buffers.blocks,
            paged_kv_last_page_len_buffer=buffers.last_lengths,
        )
        # else each wrapper would have 8 MiB of its own, on the device and pinned on the host
        self.wrapper.reset_workspace_buffer(workspace, buffers.schedules[view])

    def plan(self, inputs: PlanInputs) -> None:
        # without `seq_lens` FlashInfer computes them, in memory that is not pinned
        places = inputs.block_ends, inputs.blocks, inputs.last_lengths
        options = self.options | {"seq_lens": inputs.lengths}
        if self.is_captured:
            self.wrapper.plan(*places, head_dim=self.dim, **options)
            return
        # without the longest it looks for it, number by number
        options |= {"causal": True, "max_token_per_sequence": inputs.longest}
        self.wrapper.plan(inputs.query_ends, *places, head_dim_qk=self.dim, **options)

    def run(self, module: Any, query: torch.Tensor, sinks: Any, output: torch.Tensor) -> None:
        """A sink takes its share of a softmax whose sum is known: what is left of the output is `sigmoid(log
        sum - sink)`.
        """
        cache = (module.keys, module.values)
        scales = {"k_scale": module.key_scale, "v_scale": module.value_scale}
        if sinks is None:
            self.wrapper.run(query, cache, out=output, **scales)
        else:
            _, log2_sum = self.wrapper.run(query, cache, out=output, return_lse=True, **scales)
            output.mul_(torch.sigmoid(log2_sum / LOG2_E - sinks)[..., None])


class LatentPlan:
    """Kernels over latents (LayerSpec.latent), planned for the rows of a step of either kind. Each has 8
    MiB of its own for schedules, on the device and on the host.

    The kernel is named: of the others that FlashInfer would choose among on some GPUs, none is planned anew
    for a captured step.

    Attributes:
        heads: of the queries that were planned, see `planned_heads`.
    """

    def __init__(
        self,
        geometry: Geometry,
        view: LayerSpec,
        workspace: torch.Tensor,
        generation: int,
        buffers: PlanInputs | None = None,
    ) -> None:
        """As PagePlan's."""
        fixed = {} if buffers is None else buffers.latent_metadata
        self.geometry = geometry
        self.view = view
        self.heads = 0
        self.wrapper = BatchMLAPagedAttentionWrapper(
            workspace, use_cuda_graph=bool(fixed), backend=latent_kernel(generation), **fixed
        )

    def plan(self, inputs: PlanInputs) -> None:
        rows, tokens = len(inputs.lengths), int(inputs.query_ends[-1])
        geometry, view = self.geometry, self.view
        self.heads = heads = planned_heads(view.group, inputs.longest)
        if tokens * heads // 128 + 2 * rows + SPLIT_TILES > MAX_TILES:
            raise SettingError(
                "max_batch_prefill_tokens", f"{tokens} tokens with {heads} heads are too many for one step"
            )
        self.wrapper.plan(
            metadata=MLAPlanMetadata.csr(**inputs.latent_metadata),
            num_heads=heads,
            head_dim_ckv=view.value_dim,
            head_dim_kpe=view.key_dim,
            page_size=geometry.block_size,
            causal=True,
            sm_scale=view.scaling,
            q_data_type=geometry.dtype,
            kv_data_type=geometry.kv_dtype,
            query_layout="split",
            kv_cache_layout="split",
        )

    def run(self, module: Any, query: torch.Tensor, sinks: None, output: torch.Tensor) -> None:
        """query [tokens, heads, rank + rotary_dim], output [tokens, heads, rank], of the model's dtype"""
        rank, heads = module.values.shape[3], query.shape[1]
        if heads < self.heads:
            query = pad(query, (0, 0, 0, self.heads - heads))
        out = output if heads == self.heads else query.new_empty(len(query), self.heads, rank)
        self.wrapper.run(
            query=(query[..., :rank], query[..., rank:]),
            kv_cache=(module.values[:, 0], module.keys[:, 0]),
            out=out,
        )
        if out is not output:
            output.copy_(out[:, :heads])


def processors_of(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


class Plans:
    """The plans of steps, by view.

    A plan waits in pinned memory for the step before to end: the next one is made when that has been read, so
    the host hardly ever waits for that. Of captured steps there is one set for each number of rows. Such
    a step reads what its tensors hold when it is replayed; `plan_decode`, outside of the graph, copies a
    step's blocks and schedule there. Steps run one after the other, so all numbers of rows share the tensors.

    Attributes:
        planned: by view, whether rows that decode need plans, too.
        current: the plans of the step that was planned last, and is not captured.
        buffers: of captured steps of `max_rows` rows, on the device.
        captured: by number of rows; None for views that need no plans.
        copied: the newest plan has been copied; None on CPU.
    """

    def __init__(
        self,
        geometry: Geometry,
        planned: Sequence[bool],
        workspace: torch.Tensor,
        generation: int,
        max_rows: int,
        max_blocks: int,
    ) -> None:
        self.geometry = geometry
        self.planned = planned
        self.device = device = workspace.device
        self.fixed = (workspace, generation)
        self.current = [self.make(view) for view in geometry.views]
        self.copied = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        schedules = {
            view: torch.zeros(SCHEDULE_BYTES, dtype=torch.uint8, device=device)
            for view, is_planned in zip(geometry.views, planned, strict=True)
            if is_planned
        }
        num_blocks = max_rows * max_blocks if schedules else 0
        self.buffers = empty_inputs(max_rows, num_blocks, schedules, device)
        self.captured: dict[int, list[PagePlan | LatentPlan | None]] = {}

    def make(self, view: LayerSpec, buffers: PlanInputs | None = None) -> PagePlan | LatentPlan:
        kind: type[PagePlan | LatentPlan] = LatentPlan if view.latent else PagePlan
        return kind(self.geometry, view, *self.fixed, buffers)

    @contextlib.contextmanager
    def uploading(self) -> Iterator[None]:
        """Within it a plan is made in pinned memory, after the copies of the one before to the device."""
        if self.copied:
            self.copied.synchronize()
        yield
        if self.copied:
            self.copied.record()

    def plan(self, rows: RowTable, first: int) -> None:
        """Plan the rows from `first` on; in views that are `planned` all rows."""
        with self.uploading():
            for is_planned, begin in ((True, 0), (False, first)):
                views = zip(self.current, self.planned, strict=True)
                plans = [plan for plan, own in views if own == is_planned]
                if plans and begin < len(rows.counts):
                    parts = rows.counts[begin:], rows.lengths[begin:], rows.blocks[rows.starts[begin] :]
                    inputs = plan_inputs(*parts, self.geometry.block_size, self.device)
                    for plan in plans:
                        plan.plan(inputs)

    def plan_decode(self, positions: Int32, table: Int32) -> None:
        """Plan rows that decode: positions int32 [rows], table int32 [rows, blocks]."""
        rows = len(positions)
        if rows not in self.captured:
            buffers = self.buffers.of_rows(rows)
            self.captured[rows] = [
                self.make(view, buffers) if is_planned else None
                for view, is_planned in zip(self.geometry.views, self.planned, strict=True)
            ]
        block_size, lengths = self.geometry.block_size, positions.astype(np.int64) + 1
        blocks = table[np.arange(table.shape[1]) * block_size < lengths[:, None]]
        inputs = plan_inputs(np.ones_like(lengths), lengths, blocks, block_size, self.device)
        with self.uploading():
            for plan in self.captured[rows]:
                if plan:
                    plan.plan(inputs)


log = logging.getLogger(__name__)

COUNTERS_BYTES = 8 * 2**20
"""XQA's counters of programs that share a row; it leaves them at zero."""
ALIGNMENT = 1024


class FlashInferBackend(AttentionBackend):
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
        geometry = with_padded_heads(geometry)
        super().__init__(geometry)
        self.device = device
        self.views = geometry.views
        reasons = [plans_needed_because(geometry, view, generation) for view in self.views]
        self.planned = [bool(why) for why in reasons]
        self.plan_free = not any(reasons)
        for why in dict.fromkeys(filter(None, reasons)):
            log.warning("FlashInfer plans each step that decodes, which is slower: %s", why)
        self.processors = processors_of(device)
        split = [view.kv_heads for view in self.views if view.window is None]
        self.split_heads = max(split, default=0) if self.plan_free else 0
        self.split_processors = self.processors
        self.counters = torch.zeros(COUNTERS_BYTES, dtype=torch.uint8, device=device)
        self.scratch = torch.empty(self.scratch_bytes(max_rows), dtype=torch.uint8, device=device)
        size = workspace_bytes(geometry, self.processors, max_rows)
        scratch = torch.empty(size, dtype=torch.uint8, device=device)
        self.plans = Plans(geometry, self.planned, scratch, generation, max_rows, max_blocks)
        self.decoders: list[Any] = [None] * len(self.views)
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
            scratch_bytes(max_rows, view.kv_heads, view.group, view.value_dim, self.processors)
            for view in views
        )
        return max(sizes, default=0) + ALIGNMENT

    def prepare_forward(self, inputs: Inputs) -> None:
        rows, first = inputs.rows, inputs.rows.num_decoding
        while first < len(rows.counts) and rows.counts[first] == 1:
            first += 1  # a token of a prompt is computed as a row that decodes
        lengths = rows.positions[: rows.begins[first]] + 1
        width = -(-int(lengths.max(initial=1)) // self.block_size)
        table = rows.blocks_of(rows.owners(0, first), 0, width)
        self.step = FlashInferStep(
            to_device(rows.slots, self.device),
            to_device(table, self.device, torch.int32),
            to_device(lengths, self.device, torch.int32),
            self.splits_rows(lengths),
        )
        self.decoders = [None] * len(self.views)
        self.plans.plan(rows, first)

    def splits_rows(self, lengths: Int32 | Int64) -> bool:
        shape = (self.split_heads, self.split_processors)
        return bool(self.split_heads and len(lengths) and splits_rows(lengths, *shape))

    def agree(self, exchange: Callable[[Any], list[Any]]) -> None:
        """Steps that are split have graphs of other sizes, and a sum over ranks must have one size. Ranks may
        have different numbers of K heads.
        """
        shapes = exchange((self.split_heads, self.processors))
        self.split_heads, self.split_processors = map(min, zip(*shapes, strict=True))

    def plan_decode(self, positions: Int32, table: Int32) -> None:
        if not self.plan_free:
            self.plans.plan_decode(positions, table)

    def prepare_decode(self, positions: torch.Tensor, table: torch.Tensor, is_split: bool = False) -> None:
        self.step = self.rows_that_decode(positions, table, is_split)
        self.decoders = self.plans.captured.get(len(positions), [None] * len(self.views))

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
            self.plans.current[number].run(module, query[rows:], sinks, output[rows:])
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
