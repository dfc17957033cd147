"""Plans: what FlashInfer's kernels must know of a step from the host, before it is launched."""

from collections.abc import Sequence
from typing import Any

import torch

from gpu_worker.engine.attention.flashinfer_inputs import (
    decode_inputs,
    empty_inputs,
    first_rows,
    plan_inputs,
)
from gpu_worker.engine.attention.flashinfer_support import workspace_bytes
from gpu_worker.engine.attention.flashinfer_wrappers import DecodeWrapper, LatentWrapper, StepWrapper
from gpu_worker.engine.attention.kv_cache import Geometry, LayerSpec
from gpu_worker.engine.batch.inputs import Span
from gpu_worker.engine.batch.step_result import Int32

SCHEDULE_BYTES = 2**20
"""Of a captured step: some 20 bytes for each row, and for each program of the kernel."""


def make_workspace(geometry: Geometry, device: torch.device, max_rows: int) -> torch.Tensor:
    """→ uint8 [bytes]: where programs that share a row put what they hand to each other."""
    size = workspace_bytes(geometry, processors_of(device), max_rows)
    return torch.empty(size, dtype=torch.uint8, device=device)


def processors_of(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


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
        """Plan the rows of span `first` and those behind it; in views that are `planned` all rows."""
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
