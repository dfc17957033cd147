"""Plans: what FlashInfer's kernels must know of a step from the host, before it is launched."""

from collections.abc import Sequence
from typing import Any

import flashinfer
import torch

from gpu_worker.engine.attention.flashinfer_inputs import Int32, decode_arrays, plan_arrays, plan_options
from gpu_worker.engine.attention.flashinfer_support import workspace_bytes
from gpu_worker.engine.attention.kv_cache import AttentionSpec, Geometry
from gpu_worker.engine.batch.inputs import Span
from gpu_worker.engine.batch.to_device import pinned, to_device

SCHEDULE_BYTES = 2**20
"""Of a captured step: some 20 bytes for each row, and for each program of the kernel."""


def make_workspace(geometry: Geometry, device: torch.device, max_rows: int) -> torch.Tensor:
    """→ uint8 [bytes]: where programs that share a row put what they hand to each other."""
    cuda = device.type == "cuda"
    processors = torch.cuda.get_device_properties(device).multi_processor_count if cuda else 1
    return torch.empty(workspace_bytes(geometry, processors, max_rows), dtype=torch.uint8, device=device)


class Uploads:
    """What is on its way from a plan's pinned memory to the device; the next plan there must wait for it."""

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

    def __init__(self, geometry: Geometry, planned: Sequence[bool], workspace: torch.Tensor) -> None:
        self.geometry = geometry
        self.planned = planned
        self.device = workspace.device
        self.turns = [
            [flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND") for _ in planned]
            for _ in range(2)
        ]
        self.uploads = [Uploads(self.device) for _ in self.turns]
        self.current = 0

    @property
    def wrappers(self) -> list[Any]:
        """Of the step that was planned last, by view."""
        return self.turns[self.current]

    def plan(self, spans: Sequence[Span], first: int) -> None:
        """Plan the rows of span `first` and those behind it; in views that are `planned` all rows."""
        self.current = 1 - self.current
        with self.uploads[self.current]:
            for is_planned, part in ((True, spans), (False, spans[first:])):
                views = [view for view, planned in enumerate(self.planned) if planned == is_planned]
                if views and part:
                    self.plan_views(views, part)

    def plan_views(self, views: Sequence[int], spans: Sequence[Span]) -> None:
        arrays = plan_arrays(spans, self.geometry.block_size)
        query_ends, block_ends, last_lengths, lengths = (
            pinned(values, self.device)
            for values in (arrays.query_ends, arrays.block_ends, arrays.last_lengths, arrays.lengths)
        )
        blocks = to_device(arrays.blocks, self.device)
        for view in views:
            self.wrappers[view].plan(
                query_ends,
                block_ends,
                blocks,
                last_lengths,
                head_dim_qk=self.geometry.layers[0].key_dim,
                causal=True,
                seq_lens=lengths,  # or FlashInfer computes them, in memory that is not pinned
                max_token_per_sequence=arrays.longest,  # or it looks for it, number by number
                **plan_options(self.geometry, self.geometry.specs[view]),
            )


class DecodePlans:
    """FlashInfer's decode wrappers for captured steps: for each number of rows one of each view that needs
    plans.

    A captured step reads what its wrappers' tensors hold when it is replayed; `plan`, outside of the graph,
    copies a step's blocks and schedule there. Steps run one after the other, so all numbers of rows share the
    tensors.

    Attributes:
        block_ends, last_lengths: int32 [rows + 1] and [rows]; as in PlanArrays.
        blocks: int32 [rows * blocks]; none where no view needs plans.
        schedules: by view that needs plans, uint8 [SCHEDULE_BYTES]
        wrappers: by number of rows, then by view.
    """

    def __init__(
        self,
        geometry: Geometry,
        planned: Sequence[bool],
        workspace: torch.Tensor,
        max_rows: int,
        max_blocks: int,
    ) -> None:
        self.geometry = geometry
        self.workspace = workspace
        self.device = device = workspace.device
        self.block_ends = torch.zeros(max_rows + 1, dtype=torch.int32, device=device)
        self.last_lengths = torch.zeros(max_rows, dtype=torch.int32, device=device)
        num_blocks = max_rows * max_blocks if any(planned) else 0
        self.blocks = torch.zeros(num_blocks, dtype=torch.int32, device=device)
        self.schedules = {
            spec: torch.zeros(SCHEDULE_BYTES, dtype=torch.uint8, device=device)
            for spec, is_planned in zip(geometry.specs, planned, strict=True)
            if is_planned
        }
        self.wrappers: dict[int, dict[AttentionSpec, Any]] = {}
        self.uploads = Uploads(device)

    def plan(self, positions: Int32, table: Int32) -> None:
        """Plan rows that decode: positions int32 [rows], table int32 [rows, blocks]."""
        rows = len(positions)
        if rows not in self.wrappers:
            self.wrappers[rows] = {spec: self.make_wrapper(rows, spec) for spec in self.schedules}
        arrays = decode_arrays(positions, table, self.geometry.block_size)
        block_ends, last_lengths, lengths = (
            pinned(values, self.device) for values in (arrays.block_ends, arrays.last_lengths, arrays.lengths)
        )
        blocks = to_device(arrays.blocks, self.device)
        with self.uploads:
            for spec, wrapper in self.wrappers[rows].items():
                wrapper.plan(
                    block_ends,
                    blocks,
                    last_lengths,
                    head_dim=self.geometry.layers[0].key_dim,
                    seq_lens=lengths,
                    **plan_options(self.geometry, spec),
                )

    def make_wrapper(self, rows: int, spec: AttentionSpec) -> Any:
        """By tensor cores: FlashInfer's other kernel serves few numbers of queries that share a K head."""
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self.workspace,
            "HND",
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=self.block_ends[: rows + 1],
            paged_kv_indices_buffer=self.blocks,
            paged_kv_last_page_len_buffer=self.last_lengths[:rows],
        )
        # Without this each has 8 MiB of its own, on the device and pinned on the host.
        wrapper.reset_workspace_buffer(self.workspace, self.schedules[spec])
        return wrapper
