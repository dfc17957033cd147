"""Plans of FlashInfer: what its kernels must know of a step from the host, before the step is launched; and
the wrappers of the kernels that need plans.
"""

from collections.abc import Sequence
from typing import Any

import flashinfer
import torch
from flashinfer.mla import BatchMLAPagedAttentionWrapper, MLAPlanMetadata
from torch.nn.functional import pad

from common.settings.settings import SettingError
from gpu_worker.engine.attention.flashinfer_inputs import (
    PlanInputs,
    decode_inputs,
    empty_inputs,
    first_rows,
    plan_inputs,
    plan_options,
)
from gpu_worker.engine.attention.flashinfer_support import latent_kernel, planned_heads, workspace_bytes
from gpu_worker.engine.attention.kv_cache import Geometry, LayerSpec
from gpu_worker.engine.batch.inputs import Span
from gpu_worker.engine.batch.step_result import Int32

LOG2_E = 1.4426950408889634
MAX_TILES = 16_384
"""Tiles of a step over latents that FlashInfer has room for, of 128 queries each, some for parts of long
rows. Its own refusal would name no setting.
"""
SPLIT_TILES = 512
"""Tiles that FlashInfer may need for parts of long rows."""
SCHEDULE_BYTES = 2**20
"""Of a captured step: about 20 bytes for each row, and for each program of the kernel."""


class StepWrapper:
    """Kernels of steps that are not captured: prompts, and rows that decode. Query and output [tokens, heads,
    dim] of the model's dtype, sinks float32 [heads].
    """

    def __init__(self, workspace: torch.Tensor) -> None:
        """workspace uint8 [bytes]"""
        self.wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")

    def plan(self, inputs: PlanInputs, geometry: Geometry, view: LayerSpec) -> None:
        self.wrapper.plan(
            inputs.query_ends,
            inputs.block_ends,
            inputs.blocks,
            inputs.last_lengths,
            head_dim_qk=view.key_dim,
            causal=True,
            seq_lens=inputs.lengths,  # or FlashInfer computes them, in memory that is not pinned
            max_token_per_sequence=inputs.longest,  # or it looks for it, number by number
            **plan_options(geometry, view.spec),
        )

    def run(self, module: Any, query: torch.Tensor, sinks: Any, output: torch.Tensor) -> None:
        run_over_pages(self.wrapper, module, query, sinks, output)


class DecodeWrapper:
    """Kernels of captured steps of one number of rows, all of which decode. They use tensor cores:
    FlashInfer's other kernel serves few numbers of queries that share a K head. Query and output [rows,
    heads, dim] of the model's dtype, sinks float32 [heads].
    """

    def __init__(self, workspace: torch.Tensor, schedule: torch.Tensor, buffers: PlanInputs) -> None:
        """workspace and schedule uint8 [bytes]; `buffers` are what the graph reads."""
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
        self.wrapper.reset_workspace_buffer(workspace, schedule)

    def plan(self, inputs: PlanInputs, geometry: Geometry, view: LayerSpec) -> None:
        self.wrapper.plan(
            inputs.block_ends,
            inputs.blocks,
            inputs.last_lengths,
            head_dim=view.key_dim,
            seq_lens=inputs.lengths,
            **plan_options(geometry, view.spec),
        )

    def run(self, module: Any, query: torch.Tensor, sinks: Any, output: torch.Tensor) -> None:
        run_over_pages(self.wrapper, module, query, sinks, output)


class LatentWrapper:
    """Kernels of layers that keep latents (AttentionSpec.latent), in steps of either kind. Each has 8 MiB of
    its own for schedules, on the device and on the host.

    The kernel is named: of the others that FlashInfer would choose among on some GPUs, none is planned anew
    for a captured step.

    Attributes:
        heads: of the queries that were planned, see `planned_heads`.
    """

    def __init__(self, workspace: torch.Tensor, generation: int, buffers: PlanInputs | None = None) -> None:
        """workspace uint8 [bytes]; `buffers` are what the graph reads of a captured step."""
        fixed = {} if buffers is None else latent_metadata(buffers)
        self.heads = 0
        self.wrapper = BatchMLAPagedAttentionWrapper(
            workspace, use_cuda_graph=bool(fixed), backend=latent_kernel(generation), **fixed
        )

    def plan(self, inputs: PlanInputs, geometry: Geometry, view: LayerSpec) -> None:
        rows, tokens = len(inputs.lengths), int(inputs.query_ends[-1])
        self.heads = heads = planned_heads(view.spec.group, inputs.longest)
        if tokens * heads // 128 + 2 * rows + SPLIT_TILES > MAX_TILES:
            raise SettingError(
                "max_batch_prefill_tokens", f"{tokens} tokens with {heads} heads are too many for one step"
            )
        self.wrapper.plan(
            metadata=MLAPlanMetadata.csr(**latent_metadata(inputs)),
            num_heads=heads,
            head_dim_ckv=view.value_dim,
            head_dim_kpe=view.key_dim,
            page_size=geometry.block_size,
            causal=True,
            sm_scale=view.spec.scaling,
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


def latent_metadata(inputs: PlanInputs) -> dict[str, torch.Tensor]:
    """→ int32 [rows + 1], [rows + 1], [blocks], [rows], by FlashInfer's names"""
    return {
        "qo_indptr": inputs.query_ends,
        "kv_indptr": inputs.block_ends,
        "kv_indices": inputs.blocks,
        "kv_len_arr": inputs.lengths,
    }


def run_over_pages(wrapper: Any, module: Any, query: torch.Tensor, sinks: Any, output: torch.Tensor) -> None:
    """A sink takes its share of a softmax whose sum is known: what is left of the output is `sigmoid(log sum
    - sink)`. query and output [tokens, heads, dim] of the model's dtype, sinks float32 [heads]
    """
    cache = (module.keys, module.values)
    scales = {"k_scale": module.key_scale, "v_scale": module.value_scale}
    if sinks is None:
        wrapper.run(query, cache, out=output, **scales)
    else:
        _, log2_sum = wrapper.run(query, cache, out=output, return_lse=True, **scales)
        output.mul_(torch.sigmoid(log2_sum / LOG2_E - sinks)[..., None])


def make_workspace(geometry: Geometry, device: torch.device, max_rows: int) -> torch.Tensor:
    """→ uint8 [bytes]: where programs that share a row exchange results."""
    size = workspace_bytes(geometry, processors_of(device), max_rows)
    return torch.empty(size, dtype=torch.uint8, device=device)


def processors_of(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


class Uploads:
    """Copies on their way from a plan's pinned memory to the device: the next plan there must wait for
    them.
    """

    def __init__(self, device: torch.device) -> None:
        self.copied = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def __enter__(self) -> None:
        if self.copied:
            self.copied.synchronize()

    def __exit__(self, *error: object) -> None:
        if self.copied:
            self.copied.record()


class StepPlans:
    """FlashInfer's wrappers for steps that are not captured, one for each view. Two sets of them take turns:
    the plan of one step may wait in pinned memory while the next one is made.

    Attributes:
        planned: by view, whether rows that decode need plans, too.
    """

    def __init__(
        self, geometry: Geometry, planned: Sequence[bool], workspace: torch.Tensor, generation: int
    ) -> None:
        self.geometry = geometry
        self.planned = planned
        self.device = workspace.device
        self.turns: list[list[Any]] = [
            [
                LatentWrapper(workspace, generation) if view.spec.latent else StepWrapper(workspace)
                for view in geometry.views
            ]
            for _ in range(2)
        ]
        self.uploads = [Uploads(self.device) for _ in self.turns]
        self.current = 0

    @property
    def wrappers(self) -> list[Any]:
        """The wrappers of the step that was planned last, by view."""
        return self.turns[self.current]

    def plan(self, spans: Sequence[Span], first: int) -> None:
        """Plan the rows from span `first` on; in views that are `planned` all rows."""
        self.current = 1 - self.current
        with self.uploads[self.current]:
            for is_planned, part in ((True, spans), (False, spans[first:])):
                views = [view for view, planned in enumerate(self.planned) if planned == is_planned]
                if views and part:
                    self.plan_views(views, part)

    def plan_views(self, views: Sequence[int], spans: Sequence[Span]) -> None:
        inputs = plan_inputs(spans, self.geometry.block_size, self.device)
        for view in views:
            self.wrappers[view].plan(inputs, self.geometry, self.geometry.views[view])


class DecodePlans:
    """FlashInfer's wrappers for captured steps: for each number of rows one of each view that needs plans.

    A captured step reads what its wrappers' tensors hold when it is replayed; `plan`, outside of the graph,
    copies a step's blocks and schedule there. Steps run one after the other, so all numbers of rows share the
    tensors.

    Attributes:
        buffers: on the device, of `max_rows` rows.
        schedules: by view that needs plans, uint8 [SCHEDULE_BYTES]
        wrappers: by number of rows, then by view.
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
        self.workspace = workspace
        self.generation = generation
        self.device = device = workspace.device
        self.buffers = empty_inputs(max_rows, max_rows * max_blocks if any(planned) else 0, device)
        self.schedules = {
            view: torch.zeros(SCHEDULE_BYTES, dtype=torch.uint8, device=device)
            for view, is_planned in zip(geometry.views, planned, strict=True)
            if is_planned
        }
        self.wrappers: dict[int, dict[LayerSpec, Any]] = {}
        self.uploads = Uploads(device)

    def plan(self, positions: Int32, table: Int32) -> None:
        """Plan rows that decode: positions int32 [rows], table int32 [rows, blocks]."""
        rows = len(positions)
        if rows not in self.wrappers:
            self.wrappers[rows] = {view: self.make_wrapper(rows, view) for view in self.schedules}
        inputs = decode_inputs(positions, table, self.geometry.block_size, self.device)
        with self.uploads:
            for view, wrapper in self.wrappers[rows].items():
                wrapper.plan(inputs, self.geometry, view)

    def make_wrapper(self, rows: int, view: LayerSpec) -> Any:
        buffers = first_rows(self.buffers, rows)
        if view.spec.latent:
            return LatentWrapper(self.workspace, self.generation, buffers)
        return DecodeWrapper(self.workspace, self.schedules[view], buffers)
