"""Tensor parallel: a rank's part of a model, read from the checkpoint and joined to the others' parts.

The part is a smaller model of the same class, with plain tensors. What its plan splits comes together in a
few modules, whose `forward` sums or joins the ranks' results (arXiv:1909.08053).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from common import model_files
from common.settings.settings import SettingError, Settings
from gpu_worker.engine.attention.backend import UnservableModel
from gpu_worker.engine.model import dummy
from gpu_worker.engine.model.weights import (
    TEXT_KEY_MAPPING,
    check_types,
    check_whole,
    load_pretrained,
    meta_model,
)
from gpu_worker.engine.parallel.communicator import Communicator
from gpu_worker.engine.parallel.tp_plan import (
    EMBEDDING,
    GATHERED,
    SPLIT,
    SUMMED,
    Interval,
    TensorShards,
    TpPlan,
    make_tp_plan,
)

NO_TP_PLAN = TpPlan({}, {})

# --- reading ------------------------------------------------------------------------------------------------


class RankSlices:
    """Stands for a tensor of a safetensors file, as transformers takes it, and reads only `intervals` of one
    dimension.
    """

    def __init__(self, whole: Any, dim: int, intervals: Sequence[Interval]) -> None:
        self.whole, self.dim, self.intervals = whole, dim, intervals

    def get_dtype(self) -> str:
        return str(self.whole.get_dtype())

    def get_shape(self) -> list[int]:
        shape = list(self.whole.get_shape())
        shape[self.dim] = sum(end - begin for begin, end in self.intervals)
        return shape

    def __getitem__(self, everything: Any) -> torch.Tensor:
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
) -> tuple[Any, TpPlan]:
    """This rank's part of a model on its device, and how all parts belong together. Raises as `read_weights`,
    and Unservable.
    """
    if getattr(config, "quantization_config", None) is not None:
        raise SettingError(
            "num_shard",
            f"{communicator.world_size}, but {settings.model_id} is quantised, and its weights cannot be split",
        )
    whole = meta_model(config, settings)
    plan = make_tp_plan(whole, communicator.world_size)
    part = sharded_class(type(whole), plan.cuts, communicator.rank)
    if settings.makes_weights:
        return alike(
            dummy.make_dummy_model(part, config, dtype, device, settings, communicator.rank),
            plan,
            communicator,
        ), plan
    check_whole(path, settings.model_id)
    check_types(path, settings.model_id)
    tensors = dict(rank_tensors(path, whole, plan.cuts, communicator.rank))
    model = load_pretrained(
        partial(part.from_pretrained, None, config=config, state_dict=tensors), settings, dtype=dtype
    )
    return model.to(device), plan


def alike(model: Any, plan: TpPlan, communicator: Communicator) -> Any:
    """The model, in which what every rank holds all of is rank 0's."""
    for name, parameter in model.named_parameters():
        if name not in plan.cuts:
            communicator.broadcast_tensor(parameter.data)
    return model


def sharded_class(whole: type[Any], cuts: Mapping[str, TensorShards], rank: int) -> type[Any]:
    """The class of a model → the same, whose models are a rank's part. It keeps the name by which
    transformers finds its conversions.
    """

    def __init__(self: Any, *arguments: Any, **options: Any) -> None:
        whole.__init__(self, *arguments, **options)
        shrink_parameters(self, cuts, rank)

    return type(whole.__name__, (whole,), {"__init__": __init__, "__module__": whole.__module__})


def rank_tensors(
    path: Path, model: Any, cuts: Mapping[str, TensorShards], rank: int
) -> Iterator[tuple[str, Any]]:
    """The checkpoint's tensors by their names in it, each as this rank needs it; none is read yet."""
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    changes = get_model_conversion_mapping(model, TEXT_KEY_MAPPING)
    renamings = [change for change in changes if isinstance(change, WeightRenaming)]
    converters = [change for change in changes if isinstance(change, WeightConverter)]
    side_by_side = {
        pattern: all(
            isinstance(operation, MergeModulelist | Concatenate) for operation in converter.operations
        )
        for converter in converters
        for pattern in converter.source_patterns
    }
    for file in model_files.weight_files(path):
        opened: Any = safe_open(file, framework="pt")
        for key in opened.keys():  # noqa: SIM118
            name, converted = rename_source_key(key, renamings, converters, model.base_model_prefix, shapes)
            tensor = opened.get_slice(key)
            if name in cuts and converted and not side_by_side[converted]:
                raise UnservableModel(
                    f"its checkpoint has {name} in another form, which cannot be split between ranks (NUM_SHARD)"
                )
            yield key, rank_slice(name, tensor, cuts[name], shapes[name], rank) if name in cuts else tensor


def rank_slice(name: str, tensor: Any, cut: TensorShards, shape: Sequence[int], rank: int) -> RankSlices:
    """`shape` is the whole parameter's; a checkpoint may have it in pieces: one for each expert, or the
    packed parts one by one.
    """
    own = tensor.get_shape()
    dim = cut.dim - (len(shape) - len(own))
    begin, end = cut.intervals[rank]
    each = shape[cut.dim] // cut.packed
    others = [size for place, size in enumerate(own) if place != dim] == [
        *shape[-len(own) :][:dim],
        *shape[cut.dim + 1 :],
    ]
    if dim < 0 or not others or own[dim] not in (each, shape[cut.dim]):
        raise UnservableModel(
            f"its checkpoint has {name} in pieces that cannot be split between ranks (NUM_SHARD)"
        )
    return RankSlices(
        tensor, dim, [(each * part + begin, each * part + end) for part in range(own[dim] // each)]
    )


def shrink_parameters(model: Any, cuts: Mapping[str, TensorShards], rank: int) -> None:
    """Leaves of each parameter, still without values, as much as the rank holds."""
    for name, cut in cuts.items():
        place, _, leaf = name.rpartition(".")
        module, parameter = model.get_submodule(place), model.get_parameter(name)
        shape, (begin, end) = list(parameter.shape), cut.intervals[rank]
        shape[cut.dim] = cut.packed * (end - begin)
        setattr(module, leaf, nn.Parameter(parameter.new_empty(shape), requires_grad=False))
        if isinstance(module, nn.Linear):
            module.out_features, module.in_features = module.weight.shape
        elif isinstance(module, nn.Embedding):
            module.num_embeddings, module.padding_idx = shape[0], None


# --- joining ------------------------------------------------------------------------------------------------

Forward = Callable[..., torch.Tensor]


def connect_shards(model: Any, plan: TpPlan, communicator: Communicator) -> None:
    """Makes the ranks' parts compute what the whole model would."""
    for name, style in plan.styles.items():
        module, cut = model.get_submodule(name), plan.cuts.get(f"{name}.weight")
        if style in SPLIT and cut:
            module.forward = partial(split_input, module.forward, cut.intervals[communicator.rank])
        if style in SUMMED:
            if communicator.rank and getattr(module, "bias", None) is not None:
                module.bias.data.zero_()  # a sum has it once
            module.forward = partial(reduce_output, module.forward, communicator)
        elif style in GATHERED and cut:
            module.forward = partial(
                gather_output, module.forward, communicator, [end - begin for begin, end in cut.intervals]
            )
        elif style == EMBEDDING and cut:
            module.forward = partial(
                embed_shard, module.forward, communicator, cut.intervals[communicator.rank]
            )


def reduce_output(forward: Forward, communicator: Communicator, *inputs: Any, **options: Any) -> torch.Tensor:
    return communicator.all_reduce(forward(*inputs, **options))


def gather_output(
    forward: Forward, communicator: Communicator, sizes: Sequence[int], rows: torch.Tensor
) -> torch.Tensor:
    return communicator.all_gather(forward(rows), sizes)


def split_input(forward: Forward, mine: Interval, rows: torch.Tensor) -> torch.Tensor:
    return forward(rows[..., mine[0] : mine[1]])


def embed_shard(
    forward: Forward, communicator: Communicator, mine: Interval, ids: torch.Tensor
) -> torch.Tensor:
    """Ids of other ranks are zeros here, and their sum is the embedding."""
    begin, end = mine
    elsewhere = (ids < begin) | (ids >= end)
    rows = forward((ids - begin).masked_fill(elsewhere, 0))
    return communicator.all_reduce(rows.masked_fill(elsewhere[..., None], 0))
