"""Quantising: a plain checkpoint becomes a quantised one, layer by layer. The inputs of a layer are the
outputs of the layers before it as they are quantised, so that its rounding makes up for theirs.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from common.quantize_job import GROUP_SIZES, WHOLE_ROW, QuantizeJob
from common.settings.settings import SettingError
from gpu_worker.engine.cuda.linear import round_rows
from gpu_worker.engine.model.quantized_linears import ROUTERS
from gpu_worker.engine.quantization.weight import Fields
from gpu_worker.engine.quantizing import formats
from gpu_worker.engine.quantizing.awq import scale_inputs
from gpu_worker.engine.quantizing.calibration import Calibration, sum_of_losses
from gpu_worker.engine.quantizing.gptq import solve
from gpu_worker.engine.quantizing.grid import Grid, Rounded
from gpu_worker.engine.quantizing.inputs import LayerInputs, recording
from gpu_worker.engine.quantizing.staged import LoadedLayer, StagedModel
from gpu_worker.protocol import UnservableModel

Progress = Callable[[str], None]
Tensors = dict[str, torch.Tensor]


@dataclass
class Result:
    """What quantising has shown.

    Attributes:
        before, after: perplexities of the held-out text.
        num_held_out: its tokens.
        group_size: inputs that share a scale; -1: all.
    """

    before: float
    after: float
    num_held_out: int
    group_size: int


@dataclass(eq=False)
class Quantizer:
    """Quantises the layers of a model.

    Attributes:
        size: inputs of a group in all layers; -1: all.
        losses: of the held-out text, sums of the plain model and of the quantised one.
        off, whole: sums of the squared errors, and of the squared weights, of a layer.
    """

    job: QuantizeJob
    model: StagedModel
    calibration: Calibration
    size: int
    losses: tuple[float, float] = (0.0, 0.0)
    off: float = 0.0
    whole: float = 0.0

    @torch.inference_mode()
    def layers(self, progress: Progress) -> Iterator[Tensors]:
        """The tensors [...] of any dtype of each layer in turn, by their names in the checkpoint."""
        texts = self.calibration
        empty = torch.empty(0, 0, 0, device=self.model.device)
        plain = [empty] * len(texts.held_out)
        rounded = [empty] * len(texts.all)
        for loaded in self.model.layers():
            begun_s, number = time.monotonic(), loaded.stage.number + 1
            plain = run_all(loaded, texts.held_out, plain)
            self.off = self.whole = 0.0
            changed = self.quantize(loaded, texts.all, rounded)
            rounded = run_all(loaded, texts.all, rounded)
            if loaded.stage.is_last:
                outputs = rounded[len(texts.sequences) :]
                self.losses = total_loss(plain, texts.held_out), total_loss(outputs, texts.held_out)
            seconds = time.monotonic() - begun_s
            error = (self.off / self.whole) ** 0.5
            progress(f"layer {number} of {self.model.num_layers}: error {error:.2%}, {seconds:.1f} s")
            yield changed

    def quantize(
        self, loaded: LoadedLayer, texts: Sequence[torch.Tensor], states: Sequence[torch.Tensor]
    ) -> Tensors:
        """Round the linear layers of a layer, in place; `texts` int64 [1, tokens] with the `states` [1,
        tokens, hidden] of the layer before. Returns the new tensors [...].
        """
        linears = linears_of(loaded.layer)
        before = {name: own.clone() for name, own in loaded.layer.named_parameters()}
        if self.job.method == "fp8":
            fields: Mapping[str, Mapping[str, torch.Tensor]] = {
                name: self.round_floats(linear) for name, linear in linears.items()
            }
        else:
            fields = self.round_integers(loaded, linears, texts, states)
        changed: Tensors = {}
        for name, own in fields.items():
            layer = loaded.names[f"{loaded.prefix}.{name}.weight"].removesuffix("weight")
            changed |= {layer + field: tensor.contiguous().cpu() for field, tensor in own.items()}
        for name, own in loaded.layer.named_parameters():
            if name.removesuffix(".weight") not in fields and not torch.equal(own, before[name]):
                changed[loaded.names[f"{loaded.prefix}.{name}"]] = own.cpu()
        return changed

    def round_integers(
        self,
        loaded: LoadedLayer,
        linears: Mapping[str, nn.Linear],
        texts: Sequence[torch.Tensor],
        states: Sequence[torch.Tensor],
    ) -> Mapping[str, Fields]:
        """Round by GPTQ or AWQ; `texts` int64 [1, tokens], `states` [1, tokens, hidden] float32."""
        names = {linear: name for name, linear in linears.items()}
        grid = Grid(self.job.bits, self.job.method == "gptq", scale_dtype(self.model, names.values(), loaded))
        with recording(loaded.layer, list(names)) as recorder:
            for ids, own in list(zip(texts, states, strict=True))[: len(self.calibration.sequences)]:
                loaded.run(ids, own)
                recorder.end_run()
        if self.job.method == "awq":
            sizes = {inputs_of(group.linears[0], self.size) for group in recorder.groups}
            for size in sizes:
                groups = [it for it in recorder.groups if inputs_of(it.linears[0], self.size) == size]
                scale_inputs(loaded.layer, groups, grid, size, lambda: loaded.run(texts[0], states[0]))
            round_norms(loaded, self.model)
        fields = {}
        for group in recorder.groups:
            for linear in group.linears:
                rounded = self.round(linear, group, grid)
                self.replace(linear, rounded.widen())
                fields[names[linear]] = self.integer_fields(rounded, grid)
        return fields

    def round(self, linear: nn.Linear, group: LayerInputs, grid: Grid) -> Rounded:
        size, weight = inputs_of(linear, self.size), linear.weight.detach()
        if self.job.method == "awq":
            return grid.round_groups(weight, size, group.hessian.diagonal().contiguous())
        return solve(weight, group.hessian, grid, size, self.job.act_order, self.job.damping)

    def integer_fields(self, rounded: Rounded, grid: Grid) -> Fields:
        on_host = Rounded(rounded.quants.cpu(), rounded.scales.cpu(), rounded.zeros.cpu())
        if self.job.method == "awq":
            return formats.awq_fields(on_host, grid.dtype)
        return formats.gptq_fields(on_host, self.job.bits, grid.dtype)

    def round_floats(self, linear: nn.Linear) -> Fields:
        values, scales = round_rows(linear.weight.detach())
        self.replace(linear, values.float() * scales)
        return {"weight": values, "weight_scale": scales}

    def replace(self, linear: nn.Linear, rounded: torch.Tensor) -> None:
        """Give a layer its rounded weights, float32 [outputs, inputs]."""
        self.off += float((linear.weight - rounded).norm() ** 2)
        self.whole += float(linear.weight.norm() ** 2)
        linear.weight.copy_(rounded)

    def result(self) -> Result:
        """What holds after the last layer."""
        count = sum(ids.shape[1] - 1 for ids in self.calibration.held_out)
        before, after = (float(torch.tensor(loss / count).exp()) for loss in self.losses)
        return Result(before, after, count, self.size)


def run_all(
    loaded: LoadedLayer, texts: Sequence[torch.Tensor], states: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """texts int64 [1, tokens], states of the layer before → of this one, as LoadedLayer.run"""
    return [loaded.run(ids, own) for ids, own in zip(texts, states, strict=True)]


def total_loss(logits: Sequence[torch.Tensor], texts: Sequence[torch.Tensor]) -> float:
    """logits float32 [1, tokens, vocabulary] and texts int64 [1, tokens]"""
    return sum(sum_of_losses(own, ids) for own, ids in zip(logits, texts, strict=True))


def inputs_of(linear: nn.Linear, size: int) -> int:
    """How many inputs of a layer share a scale."""
    return linear.in_features if size == WHOLE_ROW else size


def linears_of(layer: nn.Module) -> dict[str, nn.Linear]:
    """The linear layers of a layer that are quantised, by their names in it: all but routers."""
    return {
        name: child
        for name, child in layer.named_modules()
        if type(child) is nn.Linear and not {*name.split(".")} & ROUTERS
    }


def scale_dtype(model: StagedModel, names: Any, loaded: LoadedLayer) -> torch.dtype:
    """bfloat16 where the checkpoint has such weights, else float16."""
    name = next(iter(names))
    stored = model.tensors[loaded.names[f"{loaded.prefix}.{name}.weight"]].get_dtype()
    return torch.bfloat16 if stored == "BF16" else torch.float16


def round_norms(loaded: LoadedLayer, model: StagedModel) -> None:
    """Round what is not quantised to the type that it has in the checkpoint."""
    kinds = {"BF16": torch.bfloat16, "F16": torch.float16}
    for name, own in loaded.layer.named_parameters():
        stored = model.tensors[loaded.names[f"{loaded.prefix}.{name}"]].get_dtype()
        if own.dim() == 1 and stored in kinds:
            own.copy_(own.to(kinds[stored]))


def check_layers(model: StagedModel, job: QuantizeJob) -> int:
    """The size of groups in all layers. Raises UnservableModel for a model that cannot be quantised, and
    SettingError for a size that does not divide a layer's inputs.
    """
    layers = model.whole.get_submodule(model.plan.layers)
    linears = {
        f"{at}.{name}": linear for at, it in enumerate(layers) for name, linear in linears_of(it).items()
    }
    experts = [name for name, own in layers.named_parameters() if own.dim() == 3]
    if experts:
        raise UnservableModel(f"its experts are one parameter ({experts[0]}); linear layers are quantised")
    if not linears:
        raise UnservableModel(f"{type(model.whole).__name__} has no linear layers that can be quantised")
    multiple = formats.smallest_output(job)
    for name, linear in linears.items():
        if linear.out_features % multiple:
            raise UnservableModel(
                f"layer {name} has {linear.out_features} outputs, no multiple of {multiple}, with which "
                f"{job.method} packs {job.bits} bits"
            )
    return choose_group_size(job, {name: linear.in_features for name, linear in linears.items()})


def choose_group_size(job: QuantizeJob, inputs: Mapping[str, int]) -> int:
    """`inputs`: how many each layer has, by its name. Raises SettingError."""
    if job.method == "fp8":
        return WHOLE_ROW
    sizes = GROUP_SIZES if job.group_size is None else (job.group_size,)
    for size in sizes:
        if all(formats.divides(size, count) for count in inputs.values()):
            return size
    name, count = next((it, n) for it, n in inputs.items() if not formats.divides(sizes[-1], n))
    raise SettingError(
        "--group-size",
        f"{sizes[-1]} does not divide the {count} inputs of layer {name}; {WHOLE_ROW} is one group a row",
    )
