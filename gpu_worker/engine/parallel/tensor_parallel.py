"""Tensor parallel model: the weights of one rank, and its part of a model, connected to the other ranks'
parts.

Of each tensor of its stage the rank reads its part from the checkpoint. The part of the model is a smaller
model of the same class, with plain tensors. What its plan splits comes together in a few modules, whose
`forward` sums or gathers the ranks' results (arXiv:1909.08053).
"""

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from common.settings.settings import SettingError
from gpu_worker.engine.model.weights import (
    TEXT_KEY_MAPPING,
    ModelSource,
    check_files,
    load_pretrained,
    make_dummy_model,
    meta_model,
    quantization_method,
    quantization_of,
    read_encoder,
    without_quantization,
)
from gpu_worker.engine.parallel.communicator import Communicator
from gpu_worker.engine.parallel.stages import (
    EMBEDDING,
    GATHERED,
    SPLIT,
    SUMMED,
    WHOLE,
    Interval,
    ModelStage,
    TensorShards,
    TpPlan,
    changed_class,
    intervals_of,
    make_stage,
    make_tp_plan,
    remove_others,
)
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


def read_weights(source: ModelSource) -> tuple[Any, TpPlan, ModelStage]:
    """This rank's part of a model, how the parts of its stage belong together, and the stage. The part is on
    its device; on the CPU if some of its layers may be quantised. Raises SettingError if its weights would
    not be what the checkpoint means, UnservableModel, and what transformers raises. The weights of the head
    must be there unless the model pools.
    """
    settings, communicator, config = source.settings, source.communicator, source.config
    if source.is_encoder:
        return read_encoder(source), TpPlan({}, {}), WHOLE
    method, quantization = quantization_method(config, settings.model_id), quantization_of(config)
    plan, stage = TpPlan({}, {}), WHOLE
    if not settings.makes_weights:
        check_files(source.path, settings.model_id, is_plain=method is None)
        if method and method not in METHODS:
            return read_by_package(source, method), plan, stage
        config = without_quantization(config)
    whole = meta_model(config, settings)
    part = type(whole)
    if communicator.tp_size > 1:
        plan = make_tp_plan(whole, communicator.tp_size)
        part = changed_class(part, partial(shrink_parameters, shards=plan.shards, rank=communicator.tp_rank))
    if communicator.num_stages > 1:
        stage = make_stage(whole, communicator.stage, communicator.num_stages)
        part = changed_class(part, partial(remove_others, stage=stage))
        plan = TpPlan(
            {name: shards for name, shards in plan.shards.items() if stage.has(name)},
            {name: style for name, style in plan.styles.items() if stage.has(f"{name}.")},
        )
        config = copy.deepcopy(config)  # embedding and head are in different stages
        config.tie_word_embeddings = False
    if settings.makes_weights:
        model = make_dummy_model(part, config, source, seed=communicator.rank)
        equalize_replicas(model, plan, communicator)
        return model, plan, stage
    tensors: Mapping[str, Any] = read_tensors(source.path, quantization)
    if stage is not WHOLE:
        tensors = stage_tensors(tensors, whole, stage)
    if plan.shards:
        tensors = dict(rank_tensors(tensors, whole, plan.shards, communicator.tp_rank))
    read, needs_head = partial(part.from_pretrained, None, config=config), source.pooling is None
    try:
        model = load_pretrained(read, settings, needs_head, dtype=source.dtype, state_dict=tensors)
    except AttributeError as error:  # a stage has no module of theirs
        if stage is WHOLE:
            raise
        cause = "its code looks into layers that other stages have (PIPELINE_PARALLEL_SIZE)"
        raise UnservableModel(f"{cause}: {error}") from error
    return model if method or settings.quantize else model.to(source.device), plan, stage


def read_by_package(source: ModelSource, method: str) -> Any:
    """A whole model on its device, quantised by a method for which transformers has a quantizer, which may
    need a package. Raises SettingError.
    """
    settings, ranks = source.settings, source.communicator
    for name, size in (("num_shard", ranks.tp_size), ("pipeline_parallel_size", ranks.num_stages)):
        if size > 1:
            cause = f"{settings.model_id} is quantised ({method}), and its weights cannot be split"
            raise SettingError(name, f"{size}, but {cause}")
    read = partial(AutoModelForCausalLM.from_pretrained, source.path, config=source.config)
    try:
        return load_pretrained(read, settings, dtype=source.dtype, device_map={"": source.device})
    except (ImportError, RuntimeError, ValueError, NotImplementedError) as error:
        cause = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise SettingError("model_id", f"{settings.model_id} is quantised ({method}): {cause}") from error


def stage_tensors(tensors: Mapping[str, Any], model: Any, stage: ModelStage) -> dict[str, Any]:
    """The checkpoint's tensors that a stage of `model` has, [...] of the file's dtype; none is read yet. The
    head of a model whose head is its embedding is that tensor in the last stage.
    """
    find, head = parameter_finder(model), f"{stage.head}.weight"
    own = {}
    for key, tensor in tensors.items():
        name, _ = find(key)
        if stage.is_tied and name == head:
            continue
        if stage.has(name):
            own[key] = tensor
        if stage.is_tied and stage.is_last and name == f"{stage.embedding}.weight":
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


Forward = Callable[..., torch.Tensor]


def shrink_parameters(model: Any, shards: Mapping[str, TensorShards], rank: int) -> None:
    """Leave of each parameter [...] of any dtype, still without values, as much as the rank holds."""
    for name, own in shards.items():
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        parameter = model.get_parameter(name)
        begin, end = own.intervals[rank]
        shape = list(parameter.shape)
        shape[own.dim] = own.packed * (end - begin)
        setattr(module, leaf, nn.Parameter(parameter.new_empty(shape), requires_grad=False))
        if isinstance(module, nn.Linear):
            module.out_features, module.in_features = module.weight.shape
        elif isinstance(module, nn.Embedding):
            module.num_embeddings, module.padding_idx = shape[0], None


def connect(module: Any, forward: Callable[..., Any], **attributes: Any) -> None:
    """Give a module another forward, which finds `attributes` on it and may call its own one."""
    for name, value in attributes.items():
        setattr(module, name, value)
    module.__class__ = connected_class(type(module), forward)  # type: ignore[arg-type]


@functools.cache
def connected_class(own: type[Any], forward: Callable[..., Any]) -> type[Any]:
    """A class with another forward, which gets the class's own one. Modules that are alike share it: torch
    compiles a layer anew for each attribute of an instance that is a function of its own.
    """

    @functools.wraps(own.forward)
    def connected(self: Any, *inputs: Any, **options: Any) -> Any:
        return forward(self, own.forward, *inputs, **options)

    return type(own.__name__, (own,), {"forward": connected, "__module__": own.__module__})


def reduce_output(module: Any, forward: Forward, *inputs: Any, **options: Any) -> torch.Tensor:
    """The sum of all ranks' outputs: [..., features] of the model's dtype."""
    return module.communicator.all_reduce(forward(module, *inputs, **options))  # type: ignore[no-any-return]


def gather_output(module: Any, forward: Forward, states: torch.Tensor) -> torch.Tensor:
    """states [..., inputs] of the model's dtype → all ranks' outputs side by side, [..., sum of sizes]"""
    return module.communicator.all_gather(forward(module, states), module.own_sizes)  # type: ignore[no-any-return]


def split_input(module: Any, forward: Forward, states: torch.Tensor) -> torch.Tensor:
    """states [..., inputs] of the model's dtype → the output of this rank's own part of them"""
    begin, end = module.own_part
    return forward(module, states[..., begin:end])


def embed_own(module: Any, forward: Forward, ids: torch.Tensor) -> torch.Tensor:
    """ids int64 [1, tokens] → embeddings [1, tokens, hidden] of the model's dtype, zeros for ids of other
    ranks: the sum over the ranks is the embedding.
    """
    begin, end = module.own_part
    elsewhere = (ids < begin) | (ids >= end)
    return forward(module, (ids - begin).masked_fill(elsewhere, 0)).masked_fill(elsewhere[..., None], 0)


FORWARDS: Mapping[str, Sequence[Callable[..., torch.Tensor]]] = {
    **dict.fromkeys(SUMMED, (reduce_output,)),
    **dict.fromkeys(SPLIT, (split_input, reduce_output)),
    **dict.fromkeys(GATHERED, (gather_output,)),
    EMBEDDING: (embed_own, reduce_output),
}
"""By the styles of transformers' plan; those about parts are for modules whose weights are split."""


def connect_shards(model: Any, plan: TpPlan, communicator: Communicator) -> None:
    """Make the ranks' parts compute what the whole model would."""
    rank = communicator.tp_rank
    for name, style in plan.styles.items():
        module, shards = model.get_submodule(name), plan.shards.get(f"{name}.weight")
        if style in SUMMED and rank and getattr(module, "bias", None) is not None:
            module.bias.data.zero_()  # a sum has it once
        intervals = shards.intervals if shards else ()
        own: dict[str, Any] = {"own_part": intervals[rank]} if intervals else {}
        own |= {"own_sizes": tuple(end - begin for begin, end in intervals)}
        for forward in FORWARDS.get(style, ()):
            if intervals or (style in SUMMED and forward is reduce_output):
                connect(module, forward, communicator=communicator, **own)
