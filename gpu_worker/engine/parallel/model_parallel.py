"""How a model is split between the ranks of a stage, and into stages; the weights of one rank, and its part
of a model, connected to the other ranks' parts.

Ranks: which part of each weight one holds, by the model's own plan (transformers' `tp_plan`). A matrix is cut
as its plan says: `colwise` along its outputs, `rowwise` along its inputs. What belongs to heads is cut
between heads, so that a rank computes whole ones: with more ranks than K and V heads, ranks share one and
split the queries that look at it. Parts need not be of the same size, so nothing has to divide.

Pipeline stages: which layers each has, about as many bytes for each, and the model that computes them.

A stage's model is one of the same class, in which modules without weights stand for what other stages have:
transformers' own code runs in each stage. A stage that is not the first gets hidden states in place of
embeddings: the layers before its own return them. A stage that is not the last ends where the next stage's
first layer would begin.

Of each tensor of its stage the rank reads its part from the checkpoint. The part of the model is a smaller
model of the same class, with plain tensors. What its plan splits comes together in a few modules, whose
`forward` sums or gathers the ranks' results (arXiv:1909.08053).
"""

import contextlib
import copy
import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise
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
from gpu_worker.engine.quantization.checkpoint import METHODS, read_tensors
from gpu_worker.protocol import UnservableModel, first_line, refuse

UNITS = (64, 32, 16, 8, 1)
"""Features are cut at multiples of the first of these that gives each rank one: matrix products are faster
with aligned rows, and some require them.
"""
GATHERED = ("colwise_gather_output", "colwise_rep")
SPLIT = ("rowwise_split_input", "rowwise_rep")
EMBEDDING = "embedding_rowwise"
COLUMNS = ("colwise", "packed_colwise", EMBEDDING, *GATHERED)
ROWS = ("rowwise", *SPLIT)
SUMMED = ("all_reduce", "moe_tp_experts", *ROWS)
UNCUT = ("replicated_with_grad_allreduce", "mla_kv_a_proj", "replicate")
"""Styles about gradients only: every rank holds the whole parameter."""
KEYS_AND_VALUES = ("k_proj", "v_proj", "k_norm")
LATENT_STYLES = {"q_proj": "colwise", "q_b_proj": "colwise", "kv_b_proj": "colwise", "o_proj": "rowwise"}
"""Of latent attention, which some plans leave whole (DeepSeek-V3's): a rank has all latents and its heads."""

STATE_CALLS = {"update_conv_state", "update_recurrent_state"}
"""Methods of transformers' cache that mixers call (`states/model_states.py`)."""

Interval = tuple[int, int]


@dataclass(frozen=True, slots=True)
class TensorShards:
    """How one parameter is split: the entries that rank r holds along `dim` are `intervals[r]`, in each of
    `packed` equal parts side by side.
    """

    dim: int
    intervals: Sequence[Interval]
    packed: int = 1


@dataclass(frozen=True, slots=True)
class TpPlan:
    """How a model is split between ranks.

    Attributes:
        shards: by the name of a parameter.
        styles: of modules, by their names.
    """

    shards: Mapping[str, TensorShards]
    styles: Mapping[str, str]


def intervals_of(shards: TensorShards, size: int, rank: int) -> list[Interval]:
    """A rank's entries along the dimension that is split, of which a checkpoint's tensor [...] of any dtype
    has `size`.
    """
    begin, end = shards.intervals[rank]
    packed_size = shards.intervals[-1][1]
    return [(offset + begin, offset + end) for offset in range(0, size, packed_size)]


def split_evenly(size: int, world_size: int) -> list[Interval]:
    unit = next((unit for unit in UNITS if size >= unit * world_size), 1)
    bounds = [size // unit * rank // world_size * unit for rank in range(world_size)] + [size]
    return list(pairwise(bounds))


def split_heads(query_heads: int, kv_heads: int, world_size: int) -> tuple[list[Interval], list[Interval]]:
    """Heads of each rank: of queries, and of K and V. Each K head of a rank is seen by as many of its queries
    as any other.

    Raises:
        UnservableModel: there are fewer query heads than ranks.
    """
    group = query_heads // kv_heads
    if query_heads < world_size:
        raise UnservableModel(f"it has {query_heads} attention heads, fewer than NUM_SHARD ({world_size})")
    if kv_heads >= world_size:
        bounds = [kv_heads * rank // world_size for rank in range(world_size + 1)]
        kept = list(pairwise(bounds))
        return [(begin * group, end * group) for begin, end in kept], kept
    mine = [rank * kv_heads // world_size for rank in range(world_size)]
    queries = []
    for rank, head in enumerate(mine):
        sharers, place = mine.count(head), rank - mine.index(head)
        queries.append(
            (head * group + group * place // sharers, head * group + group * (place + 1) // sharers)
        )
    return queries, [(head, head + 1) for head in mine]


# --- the plan -----------------------------------------------------------------------------------------------


def make_tp_plan(model: Any, world_size: int) -> TpPlan:
    """The plan of a whole model, which may be on the meta device. Raises UnservableModel where its plan
    cannot be followed.
    """
    plan = tp_styles(model)
    shards: dict[str, TensorShards] = {}
    styles: dict[str, str] = {}
    mixers = mixer_prefixes(model)
    for name, module in model.named_modules():
        style = plan.get(pattern_of(name))
        if name.startswith(mixers) and style not in GATHERED:
            continue  # a plan may mean attention of the same name; ranks compute mixers whole
        if style:
            styles[name] = style
        for leaf, parameter in module.named_parameters(recurse=False):
            own = plan.get(pattern_of(f"{name}.{leaf}"), style_of(plan, name, module, parameter))
            if own and (found := shards_of(model, name, leaf, parameter.shape, own, world_size)):
                shards[f"{name}.{leaf}"] = found
    return TpPlan(shards, styles)


def mixer_prefixes(model: Any) -> tuple[str, ...]:
    """What the names of modules within mixers begin with: modules that carry states from token to token."""
    return tuple(f"{name}." for name, module in model.named_modules() if is_mixer(type(module)))


def is_mixer(kind: type[Any]) -> bool:
    """Whether the forward of these modules in transformers asks its cache for states."""
    return bool(STATE_CALLS & {*inspect.unwrap(kind.forward).__code__.co_names})


def style_of(plan: Mapping[str, str], name: str, module: nn.Module, parameter: nn.Parameter) -> str | None:
    """The style of a module's parameter: the module's own, and for a norm that has a line for each head, that
    of the projection before it.
    """
    if isinstance(module, nn.Linear | nn.Embedding):
        return plan.get(pattern_of(name))
    if parameter.dim() == 2 and plan.get(pattern_of(name).replace("_norm", "_proj")) == "colwise":
        return "colwise"
    return None


def tp_styles(model: Any) -> dict[str, str]:
    """Styles by the patterns of names; the vocabulary is always cut, except where head and embedding are one
    and the head is not cut.
    """
    plan = {name: style for name, style in (model.tp_plan or {}).items() if style not in UNCUT}
    kind, unknown = model.config.model_type, sorted({*plan.values()} - {*COLUMNS, *SUMMED})
    refuse(
        UnservableModel,
        (
            not any("*" in name for name in plan),
            f"transformers has no plan for {kind} on several ranks (NUM_SHARD)",
        ),
        (
            unknown,
            f"its plan for several ranks (NUM_SHARD) asks for {''.join(unknown[:1])}, which is not served",
        ),
    )
    names = {module: name for name, module in model.named_modules()}
    for module, name in names.items():
        if hasattr(module, "expand_kv"):
            plan = {f"{pattern_of(name)}.{leaf}": style for leaf, style in LATENT_STYLES.items()} | plan
    embedding, head = names[model.get_input_embeddings()], names.get(model.get_output_embeddings())
    plan[embedding] = EMBEDDING
    if model.config.tie_word_embeddings and head not in plan:
        del plan[embedding]
    return plan


def pattern_of(name: str) -> str:
    """`model.layers.*.mlp` of `model.layers.7.mlp`"""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def shards_of(
    model: Any, name: str, leaf: str, shape: Sequence[int], style: str, world_size: int
) -> TensorShards | None:
    """How a parameter [*shape] of any dtype is split; None where every rank holds all of it."""
    if (style in ROWS and len(shape) == 1) or style not in (*COLUMNS, *ROWS):
        return None  # a bias, added once
    dim = len(shape) - 1 if style in ROWS else max(0, len(shape) - 2)
    owner = model.get_submodule(name.rpartition(".")[0])
    if style in ("colwise", "rowwise") and hasattr(owner, "is_causal"):
        return TensorShards(dim, split_by_heads(owner, name, model.config, shape[dim], world_size))
    packed = 2 if style == "packed_colwise" else 1
    return TensorShards(dim, split_evenly(shape[dim] // packed, world_size), packed)


def split_by_heads(attention: Any, name: str, config: Any, size: int, world_size: int) -> list[Interval]:
    """How `size` features of all heads of a projection are split."""
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    query_heads = config.num_attention_heads
    if hasattr(attention, "k_proj") and hasattr(attention, "head_dim"):  # layers may differ
        kv_heads = attention.k_proj.out_features // attention.head_dim
        query_heads = kv_heads * getattr(attention, "num_key_value_groups", 1)
    queries, kept = split_heads(query_heads, kv_heads, world_size)
    mine, count = (kept, kv_heads) if name.endswith(KEYS_AND_VALUES) else (queries, query_heads)
    if size % count:
        raise UnservableModel(f"{name} has {size} features for {count} heads")
    return [(begin * size // count, end * size // count) for begin, end in mine]


def split_layers(
    layer_bytes: Sequence[int], first_bytes: int, last_bytes: int, num_stages: int
) -> list[Interval]:
    """Layers of each stage, with bytes as near to equal shares as whole layers allow. `first_bytes` are what
    the first stage has before its layers, `last_bytes` what the last one has after them. Raises
    UnservableModel.
    """
    count = len(layer_bytes)
    if count < num_stages:
        raise UnservableModel(f"it has {count} layers, fewer than PIPELINE_PARALLEL_SIZE ({num_stages})")
    ends, bounds = list(accumulate(layer_bytes, initial=first_bytes)), [0]  # bytes up to a layer
    for stage in range(1, num_stages):
        wanted = (ends[-1] + last_bytes) * stage / num_stages
        able = range(bounds[-1] + 1, count - num_stages + stage + 1)
        bounds.append(min(able, key=lambda end: abs(ends[end] - wanted)))
    return list(pairwise([*bounds, count]))


class StageEnd(Exception):
    """Raised within a model where a stage ends; `states` [1, tokens, hidden] go to the next stage."""

    def __init__(self, states: torch.Tensor) -> None:
        self.states = states


@dataclass(slots=True, eq=False)
class ModelStage:
    """One stage of a model, while it runs; by itself all of a model.

    Attributes:
        number: which of the stages.
        intervals: numbers of the layers of each stage.
        layers: name of the list of layers.
        embedding: name of the embedding, which the first stage has.
        head: name of the module that makes logits.
        tail: names of what the last stage has after the layers, the head included.
        is_tied: the head multiplies with the weights of the embedding.
        first_layer: module of its first layer.
        states: what the stage before it sent: [1, tokens, hidden] of the model's dtype.
    """

    number: int = 0
    intervals: Sequence[Interval] = ((0, 1),)
    layers: str = ""
    embedding: str = ""
    head: str = ""
    tail: Sequence[str] = ()
    is_tied: bool = False
    first_layer: Any = None
    states: torch.Tensor = field(default_factory=lambda: torch.empty(0, 0, 0))

    @property
    def num_stages(self) -> int:
        return len(self.intervals)

    @property
    def begin(self) -> int:
        """Its first layer."""
        return self.intervals[self.number][0]

    @property
    def end(self) -> int:
        """The layer after its last one."""
        return self.intervals[self.number][1]

    @property
    def is_first(self) -> bool:
        return self.number == 0

    @property
    def is_last(self) -> bool:
        return self.number == self.num_stages - 1

    def layer_of(self, name: str) -> int | None:
        """The number of the layer that a parameter belongs to; None if it belongs to none."""
        found = re.match(rf"{re.escape(self.layers)}\.(\d+)\.", name)
        return int(found[1]) if found else None

    def has(self, name: str) -> bool:
        """Whether it has a parameter. What is neither a layer nor before or after them, as tables of
        positions, each stage has.
        """
        layer = self.layer_of(name)
        if layer is not None:
            return self.begin <= layer < self.end
        if name.startswith(f"{self.embedding}."):
            return self.is_first
        return self.is_last or not name.startswith(tuple(f"{part}." for part in self.tail))

    def part_of(self, num_attentions: int) -> slice:
        """Which attention modules of the whole model it has; some models have several in a layer."""
        each = num_attentions // self.intervals[-1][1]
        return slice(self.begin * each, self.end * each)

    def run(self, model: Any, **inputs: Any) -> torch.Tensor:
        """→ logits [1, kept, vocabulary] in the last stage, else hidden states [1, tokens, hidden]"""
        try:
            logits: torch.Tensor = model(use_cache=False, return_dict=True, **inputs).logits
            return logits
        except StageEnd as end:
            return end.states

    def try_out(self, model: Any, tokens: int, device: torch.device) -> None:
        """Set random `states` of so many tokens, for a forward that belongs to no step."""
        if not self.is_first:
            noise = torch.Generator().manual_seed(0)
            states = torch.randn(1, tokens, model.config.hidden_size, generator=noise)
            self.states = states.to(device, model.dtype)


WHOLE = ModelStage()
"""Of a model that is not split into stages."""


def make_stage(model: Any, number: int, num_stages: int) -> ModelStage:
    """One stage of a whole model, which may be on the meta device. Names come from transformers' `pp_plan`,
    or from the model's one list of layers. Raises UnservableModel.
    """
    names = {module: name for name, module in model.named_modules()}
    plan = list(model.pp_plan or {})
    layers = find_layers(model)
    embedding, head = names[model.get_input_embeddings()], names.get(model.get_output_embeddings())
    if head is None:
        raise UnservableModel("it has no head that a last stage could have (PIPELINE_PARALLEL_SIZE)")
    after = plan[plan.index(layers) + 1 :] if layers in plan else []
    tail = [head, *(name for name in after if name != head)]
    layer_bytes = [num_bytes(layer) for layer in model.get_submodule(layers)]
    tail_bytes = sum(num_bytes(model.get_submodule(name)) for name in tail)
    intervals = split_layers(layer_bytes, num_bytes(model.get_submodule(embedding)), tail_bytes, num_stages)
    is_tied = bool(model.config.tie_word_embeddings)
    return ModelStage(number, intervals, layers, embedding, head, tail, is_tied)


def find_layers(model: Any) -> str:
    """The name of the list of layers: the one that transformers' `pp_plan` names, else the only one of the
    right length. Raises UnservableModel.
    """
    lists = {
        name: len(module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and not re.search(r"\.\d+(\.|$)", name)
    }
    total = model.config.num_hidden_layers
    found = [name for name in lists if name in (model.pp_plan or {})] or [
        name for name, count in lists.items() if count and total % count == 0
    ]
    if len(found) != 1:
        raise UnservableModel(
            "its layers are not one list, as stages (PIPELINE_PARALLEL_SIZE), EAGLE-3 and quantize need it"
        )
    return str(found[0])


def num_bytes(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


class RemoteLayer(nn.Module):
    """Stands for a layer of another stage, with the attributes by which a model's code chooses masks."""

    def __init__(self, layer: nn.Module, stage: ModelStage, is_before: bool) -> None:
        super().__init__()
        public = {name: value for name, value in vars(layer).items() if not name.startswith("_")}
        vars(self).update(public)
        self.stage = stage
        self.is_before = is_before

    def forward(self, *arguments: Any, **options: Any) -> Any:
        """Hidden states [1, tokens, hidden] → those that the stage before it sent. Raises StageEnd after the
        stage's last layer.
        """
        if not self.is_before:
            raise StageEnd(arguments[0] if arguments else options["hidden_states"])
        return self.stage.states


class RemoteEmbedding(nn.Module):
    """Stands for the embedding of the first stage. It gives NaN, since nothing may depend on it."""

    def __init__(self, stage: ModelStage) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids int64 [1, tokens] → [1, tokens, hidden] of the model's dtype"""
        return self.stage.states.new_full((), torch.nan).expand(self.stage.states.shape)


def changed_class(whole: type[Any], change: Callable[[Any], None]) -> type[Any]:
    """The class of a model → a class whose models are changed as soon as they are made, before weights are
    read. It keeps the name by which transformers finds its conversions.
    """

    def __init__(self: Any, *arguments: Any, **options: Any) -> None:
        whole.__init__(self, *arguments, **options)
        change(self)

    return type(whole.__name__, (whole,), {"__init__": __init__, "__module__": whole.__module__})


def remove_others(model: Any, stage: ModelStage) -> None:
    """Replace what other stages have."""
    layers = model.get_submodule(stage.layers)
    stage.first_layer = layers[stage.begin]
    for number, layer in enumerate(layers):
        if not stage.begin <= number < stage.end:
            layers[number] = RemoteLayer(layer, stage, is_before=number < stage.begin)
    if not stage.is_first:
        model.set_submodule(stage.embedding, RemoteEmbedding(stage))
    for name in () if stage.is_last else stage.tail:
        model.set_submodule(name, nn.Identity())


@contextlib.contextmanager
def checked_layers(stage: ModelStage) -> Iterator[None]:
    """Within it a forward raises UnservableModel if a layer gives the next one more than hidden states."""

    def check(module: Any, arguments: Any, output: Any) -> None:
        if isinstance(output, tuple) and any(torch.is_tensor(part) for part in output[1:]):
            cause = "its layers hand on more than hidden states, and would be in several stages"
            raise UnservableModel(f"{cause} (PIPELINE_PARALLEL_SIZE)")

    hook = stage.first_layer.register_forward_hook(check) if stage.num_stages > 1 else None
    try:
        yield
    finally:
        if hook:
            hook.remove()


def take_states(
    module: Any, forward: Callable[..., Any], states: torch.Tensor, *rest: Any, **options: Any
) -> Any:
    """The forward of a stage's first layer: hidden states [1, tokens, hidden]. The first dimension is missing
    where the model's code takes the first of a tuple that layers return: RemoteLayer returns no tuple.
    """
    return forward(module, states.view(1, *states.shape[-2:]), *rest, **options)


# --- the weights of a rank ----------------------------------------------------------------------------------


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
        cause = f"is quantised ({method}): {first_line(error)}"
        raise SettingError("model_id", f"{settings.model_id} {cause}") from error


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
