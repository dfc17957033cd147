"""LayerInputs: what calibration says of the inputs of linear layers; those with the same input share it."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn


@dataclass(eq=False)
class LayerInputs:
    """The inputs of linear layers that get the same tensor.

    Attributes:
        linears: these layers.
        giver: the module that returns the inputs as they are; None if no module with a weight does.
        hessian: the mean of the inputs' outer products, float32 [inputs, inputs].
        means: the mean of the inputs without their signs, float32 [inputs].
        count: how many inputs were seen.
    """

    linears: list[nn.Linear]
    giver: nn.Module | None
    hessian: torch.Tensor
    means: torch.Tensor
    count: int = 0

    def add(self, rows: torch.Tensor) -> None:
        """Take inputs [..., inputs] of any dtype into the means."""
        rows = rows.reshape(-1, rows.shape[-1]).float()
        share = len(rows) / (self.count + len(rows))
        self.hessian.lerp_(rows.T @ rows / len(rows), share)
        self.means.lerp_(rows.abs().mean(0), share)
        self.count += len(rows)


@dataclass(eq=False)
class InputRecorder:
    """Records the inputs of linear layers while a model runs; the first run says which share them."""

    groups: list[LayerInputs] = field(default_factory=list)
    of_linear: dict[nn.Module, LayerInputs] = field(default_factory=dict)
    outputs: list[tuple[torch.Tensor, nn.Module]] = field(default_factory=list)
    seen: list[tuple[torch.Tensor, LayerInputs]] = field(default_factory=list)

    def note_output(self, module: nn.Module, arguments: Any, output: Any) -> None:
        self.outputs.append((output, module))

    def note_input(self, linear: nn.Module, arguments: Any) -> None:
        rows = arguments[0]
        group = self.of_linear.get(linear) or next((own for it, own in self.seen if it is rows), None)
        if group is None:
            giver = next((module for output, module in self.outputs if output is rows), None)
            width = rows.shape[-1]
            zeros = rows.new_zeros(width, width, dtype=torch.float32)
            group = LayerInputs([], giver, zeros, zeros.new_zeros(width))
            self.groups.append(group)
        if linear not in self.of_linear:
            group.linears.append(linear)  # type: ignore[arg-type]
            self.of_linear[linear] = group
        if linear is group.linears[0]:
            group.add(rows)
            self.seen.append((rows, group))

    def end_run(self) -> None:
        """Forget the tensors of a run."""
        self.outputs.clear()
        self.seen.clear()


@contextlib.contextmanager
def recording(layer: nn.Module, linears: Sequence[nn.Module]) -> Iterator[InputRecorder]:
    """Within it, runs of a model record the inputs of `linears`, which are in `layer`."""
    recorder = InputRecorder()
    norms = [it for it in layer.modules() if getattr(getattr(it, "weight", None), "ndim", 0) == 1]
    hooks = [linear.register_forward_pre_hook(recorder.note_input) for linear in linears]
    hooks += [norm.register_forward_hook(recorder.note_output) for norm in norms]
    try:
        yield recorder
    finally:
        for hook in hooks:
            hook.remove()
