"""Weights of one rank: reads the tensors of its stage from the checkpoint, and of each the rank's part."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from common.settings.settings import SettingError, Settings
from gpu_worker.engine.model.config import quantization_of
from gpu_worker.engine.model.weights import (
    TEXT_KEY_MAPPING,
    check_files,
    load_pretrained,
    make_dummy_model,
    meta_model,
    quantization_method,
    without_quantization,
)
from gpu_worker.engine.parallel.communicator import Communicator
from gpu_worker.engine.parallel.shards import (
    Interval,
    TensorShards,
    TpPlan,
    intervals_of,
    make_tp_plan,
)
from gpu_worker.engine.parallel.stage_model import WHOLE, ModelStage, make_stage, staged_class
from gpu_worker.engine.parallel.stages import StagePlan, make_stage_plan
from gpu_worker.engine.parallel.tp_model import sharded_class
from gpu_worker.engine.quantization.checkpoint import METHODS, read_tensors
from gpu_worker.protocol import UnservableModel


@dataclass(frozen=True, slots=True, eq=False)
class RankSlices:
    """Stands for a tensor of a safetensors file, as transformers takes it, and reads only `intervals` of one
    dimension.
    """

    whole: Any
    dim: int
    intervals: Sequence[Interval]

    def get_dtype(self) -> str:
        return str(self.whole.get_dtype())

    def get_shape(self) -> list[int]:
        shape = list(self.whole.get_shape())
        shape[self.dim] = sum(end - begin for begin, end in self.intervals)
        return shape

    def __getitem__(self, everything: Any) -> torch.Tensor:
        """→ [*get_shape()] in the file's dtype"""
        before = (slice(None),) * self.dim
        pieces = [self.whole[(*before, slice(begin, end))] for begin, end in self.intervals]
        return pieces[0].contiguous() if len(pieces) == 1 else torch.cat(pieces, self.dim)


def read_shard(
    path: Path,
    config: Any,
    dtype: torch.dtype,
    device: torch.device,
    settings: Settings,
    communicator: Communicator,
    needs_head: bool = True,
) -> tuple[Any, TpPlan, ModelStage]:
    """This rank's part of a model, on the device that `read_weights` leaves it on, how the parts of its stage
    belong together, and the stage. Takes `needs_head` and raises as `read_weights`, and UnservableModel.
    """
    rank, num_stages = communicator.tp_rank, communicator.num_stages
    method, quantization = quantization_method(config, settings.model_id), quantization_of(config)
    if method and method not in METHODS:
        setting = ("num_shard", communicator.tp_size)
        if communicator.tp_size == 1:
            setting = ("pipeline_parallel_size", num_stages)
        raise SettingError(
            setting[0],
            f"{setting[1]}, but {settings.model_id} is quantised ({method}), and its weights cannot be split",
        )
    if not settings.makes_weights:
        config = without_quantization(config)
    whole = meta_model(config, settings)
    plan = make_tp_plan(whole, communicator.tp_size) if communicator.tp_size > 1 else TpPlan({}, {})
    part, stage = sharded_class(type(whole), plan.shards, rank), WHOLE
    own_tensors: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict
    if num_stages > 1:
        stages = make_stage_plan(whole, num_stages)
        stage = make_stage(stages, communicator.stage)
        part = staged_class(part, stages, stage)
        plan = own_plan(plan, stages, stage)
        config = untied(config)
        own_tensors = partial(stage_tensors, model=whole, plan=stages, stage=stage)
    if settings.makes_weights:
        model = make_dummy_model(part, config, dtype, device, settings, seed=communicator.rank)
        equalize_replicas(model, plan, communicator)
        return model, plan, stage
    check_files(path, settings.model_id, is_plain=method is None)
    tensors = dict(rank_tensors(own_tensors(read_tensors(path, quantization)), whole, plan.shards, rank))
    source = partial(part.from_pretrained, None, config=config)
    try:
        model = load_pretrained(source, settings, needs_head, dtype=dtype, state_dict=tensors)
    except AttributeError as error:  # a stage has no module of theirs
        if stage is WHOLE:
            raise
        cause = "its code looks into layers that other stages have (PIPELINE_PARALLEL_SIZE)"
        raise UnservableModel(f"{cause}: {error}") from error
    return model if method or settings.quantize else model.to(device), plan, stage


def own_plan(plan: TpPlan, stages: StagePlan, stage: ModelStage) -> TpPlan:
    """What concerns the parameters of one stage."""
    has = partial(stages.has, stage.number)
    return TpPlan(
        {name: shards for name, shards in plan.shards.items() if has(name)},
        {name: style for name, style in plan.styles.items() if has(f"{name}.")},
    )


def untied(config: Any) -> Any:
    """A copy of a config that describes a head of its own: embedding and head are in different stages."""
    own = copy.deepcopy(config)
    own.tie_word_embeddings = False
    return own


def stage_tensors(
    tensors: Mapping[str, Any], model: Any, plan: StagePlan, stage: ModelStage
) -> dict[str, Any]:
    """The checkpoint's tensors that a stage of `model` has, [...] of the file's dtype; none is read yet. The
    head of a model whose head is its embedding is that tensor in the last stage.
    """
    find, head = parameter_finder(model), f"{plan.head}.weight"
    own = {}
    for key, tensor in tensors.items():
        name, _ = find(key)
        if plan.is_tied and name == head:
            continue
        if plan.has(stage.number, name):
            own[key] = tensor
        if plan.is_tied and stage.is_last and name == f"{plan.embedding}.weight":
            own[head] = tensor
    return own


def equalize_replicas(model: Any, plan: TpPlan, communicator: Communicator) -> None:
    """Copy the values of the stage's first rank of every parameter that each of its ranks holds whole."""
    for name, parameter in model.named_parameters():
        if name not in plan.shards:
            communicator.broadcast_tensor(parameter.data)


def rank_tensors(
    tensors: Mapping[str, Any], model: Any, shards: Mapping[str, TensorShards], rank: int
) -> Iterator[tuple[str, Any]]:
    """The checkpoint's tensors by their names in it, each as this rank needs it, [...] of the file's dtype;
    none is read yet.
    """
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    find = parameter_finder(model)
    for key, tensor in tensors.items():
        name, converter = find(key)
        if name not in shards:
            yield key, tensor
            continue
        if converter and not all(
            isinstance(operation, MergeModulelist | Concatenate) for operation in converter.operations
        ):
            form = f"{name} in another form"
            raise UnservableModel(
                f"its checkpoint has {form}, which cannot be split between ranks (NUM_SHARD)"
            )
        yield key, rank_slices(name, tensor, shards[name], shapes[name], rank)


def parameter_finder(model: Any) -> Callable[[str], tuple[str, WeightConverter | None]]:
    """A function of the name of a checkpoint's tensor: the name of its parameter, and the conversion that
    makes it.
    """
    shapes = model.state_dict()
    changes = get_model_conversion_mapping(model, TEXT_KEY_MAPPING)
    renamings = [change for change in changes if isinstance(change, WeightRenaming)]
    converters = [change for change in changes if isinstance(change, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}

    def find(key: str) -> tuple[str, WeightConverter | None]:
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, shapes)
        return name, by_pattern[pattern] if pattern else None

    return find


def rank_slices(name: str, tensor: Any, shards: TensorShards, shape: Sequence[int], rank: int) -> RankSlices:
    """A rank's part of `tensor`, [...] of the file's dtype. `shape` is the whole parameter's; a checkpoint
    may have it in pieces: one for each expert, or the packed parts one by one.
    """
    own = tensor.get_shape()
    dim = shards.dim - (len(shape) - len(own))
    packed_size = shape[shards.dim] // shards.packed
    other_sizes = [size for place, size in enumerate(own) if place != dim]
    expected_sizes = [*shape[-len(own) :][:dim], *shape[shards.dim + 1 :]]
    if dim < 0 or other_sizes != expected_sizes or own[dim] not in (packed_size, shape[shards.dim]):
        raise UnservableModel(
            f"its checkpoint has {name} in pieces that cannot be split between ranks (NUM_SHARD)"
        )
    return RankSlices(tensor, dim, intervals_of(shards, own[dim], rank))
