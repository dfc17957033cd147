"""StagedModel: a model with one layer at a time in memory, as stages of a pipeline with a layer each."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from common.settings.settings import Settings
from gpu_worker.engine.model.config import read_config
from gpu_worker.engine.model.families import register_family
from gpu_worker.engine.model.weights import check_files, load_pretrained, meta_model, quantization_method
from gpu_worker.engine.parallel.stages import (
    ModelStage,
    StagePlan,
    learn_form,
    make_stage,
    make_stage_plan,
    staged_class,
)
from gpu_worker.engine.parallel.tensor_parallel import parameter_finder, stage_tensors, untied
from gpu_worker.engine.quantization.checkpoint import read_tensors
from gpu_worker.protocol import UnservableModel

ATTENTION = "eager"
"""transformers' own attention, written out: a sequence at a time, without a cache."""


@dataclass(eq=False)
class LoadedLayer:
    """A layer in memory, in float32, within a model that has nothing of the other layers.

    Attributes:
        names: of a parameter in the model, the name of its tensor in the checkpoint.
    """

    stage: ModelStage
    model: Any
    layer: Any
    prefix: str
    names: Mapping[str, str]

    def run(self, ids: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """ids int64 [1, tokens], states of the layer before [1, tokens, hidden] → states, or logits [1,
        tokens, vocabulary] of the last layer; all float32
        """
        self.stage.states = states
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
        return self.stage.run(self.model, input_ids=ids, position_ids=positions)


@dataclass(eq=False)
class StagedModel:
    """A plain checkpoint.

    Attributes:
        tensors: the checkpoint's, none read yet.
        whole: the model without numbers.
    """

    settings: Settings
    config: Any
    tensors: Mapping[str, Any]
    whole: Any
    plan: StagePlan
    device: torch.device

    @property
    def num_layers(self) -> int:
        return len(self.plan.intervals)

    def layers(self) -> Iterator[LoadedLayer]:
        """The layers in order, each loaded when it is asked for."""
        for number in range(self.num_layers):
            yield self.load(number)

    def load(self, number: int) -> LoadedLayer:
        stage = make_stage(self.plan, number)
        own = stage_tensors(self.tensors, self.whole, self.plan, stage)
        source = staged_class(type(self.whole), self.plan, stage).from_pretrained
        model = load_pretrained(
            lambda **options: source(None, config=untied(self.config), **options),
            self.settings,
            dtype=torch.float32,
            state_dict=own,
        )
        model.set_attn_implementation(ATTENTION)
        model.to(self.device)
        prefix = f"{self.plan.layers}.{number}"
        find = parameter_finder(self.whole)
        names = {find(key)[0]: key for key in own}
        loaded = LoadedLayer(stage, model, model.get_submodule(prefix), prefix, names)
        ids = torch.zeros(1, 4, dtype=torch.int64, device=self.device)
        stage.try_out(model, ids.shape[1], self.device)
        learn_form(model, stage, lambda: loaded.run(ids, stage.states))
        return loaded


def open_model(path: Path, settings: Settings, device: torch.device) -> StagedModel:
    """Read what a model is; no weights yet. Raises SettingError, UnservableModel."""
    config = read_config(path, settings)
    method = quantization_method(config, settings.model_id)
    if method:
        raise UnservableModel(f"it is quantised already ({method}), and plain weights are needed")
    register_family(config.model_type)
    check_files(path, settings.model_id, is_plain=True)
    whole, tensors = meta_model(config, settings), read_tensors(path)
    plan = make_stage_plan(whole, 1)
    layers = range(plan.intervals[-1][1])
    each = dataclasses.replace(plan, intervals=[(layer, layer + 1) for layer in layers])
    check_text_only(whole, tensors)
    return StagedModel(settings, config, tensors, whole, each, device)


def check_text_only(whole: Any, tensors: Mapping[str, Any]) -> None:
    """Raises UnservableModel if the checkpoint has matrices that are no part of the model for text."""
    find, known = parameter_finder(whole), whole.state_dict().keys()
    others: Sequence[str] = [
        key
        for key, tensor in tensors.items()
        if find(key)[0] not in known and len(tensor.get_shape()) > 1 and not key.startswith("lm_head.")
    ]
    if others:
        raise UnservableModel(f"it has weights beside its text model's ({others[0]}), which would stay plain")
