"""Pipeline stages: which layers each has, as many bytes for each as possible, and the model that computes
them.

A stage's model is one of the same class, in which modules without weights stand for what other stages have:
transformers' own code runs in each stage. A stage that is not the first gets hidden states in place of
embeddings: the layers before its own return them. A stage that is not the last ends where the next stage's
first layer would begin.
"""

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from gpu_worker.engine.parallel.shards import Interval
from gpu_worker.protocol import UnservableModel


def split_layers(
    layer_bytes: Sequence[int], first_bytes: int, last_bytes: int, num_stages: int
) -> list[Interval]:
    """Layers of each stage, such that the largest stage is as small as possible. `first_bytes` are what the
    first stage has before its layers, `last_bytes` what the last one has after them. Raises UnservableModel.
    """
    count = len(layer_bytes)
    if count < num_stages:
        raise UnservableModel(f"it has {count} layers, fewer than PIPELINE_PARALLEL_SIZE ({num_stages})")
    ends = list(accumulate(layer_bytes, initial=first_bytes))  # bytes up to a layer
    ends[0], ends[-1] = 0, ends[-1] + last_bytes

    @functools.cache
    def best(begin: int, stages: int) -> tuple[int, int, tuple[Interval, ...]]:
        """The largest stage of the layers from `begin` on, the sum of squares, which tells equal ones apart,
        and the stages' layers.
        """
        own = ((end, ends[end] - ends[begin]) for end in range(begin + 1, count - stages + 2))
        if stages == 1:
            size = ends[count] - ends[begin]
            return size, size * size, ((begin, count),)
        return min(
            (max(size, largest), size * size + squares, ((begin, end), *others))
            for end, size in own
            for largest, squares, others in [best(end, stages - 1)]
        )

    return list(best(0, num_stages)[2])


@dataclass(frozen=True, slots=True)
class StagePlan:
    """How a model is split into stages.

    Attributes:
        layers: name of the list of layers.
        intervals: numbers of the layers of each stage.
        embedding: name of the embedding, which the first stage has.
        head: name of the module that makes logits.
        tail: names of what the last stage has after the layers, the head included.
        is_tied: the head multiplies with the weights of the embedding.
    """

    layers: str
    intervals: Sequence[Interval]
    embedding: str
    head: str
    tail: Sequence[str]
    is_tied: bool

    def layer_of(self, name: str) -> int | None:
        """The number of the layer that a parameter belongs to; None if it belongs to none."""
        found = re.match(rf"{re.escape(self.layers)}\.(\d+)\.", name)
        return int(found[1]) if found else None

    def has(self, stage: int, name: str) -> bool:
        """Whether a stage has a parameter. What is neither a layer nor before or after them, as tables of
        positions, each stage has.
        """
        layer = self.layer_of(name)
        if layer is not None:
            begin, end = self.intervals[stage]
            return begin <= layer < end
        if name.startswith(f"{self.embedding}."):
            return stage == 0
        return stage == len(self.intervals) - 1 or not name.startswith(
            tuple(f"{part}." for part in self.tail)
        )


def make_stage_plan(model: Any, num_stages: int) -> StagePlan:
    """The plan of a whole model, which may be on the meta device. Names come from transformers' `pp_plan`, or
    from the model's one list of layers. Raises UnservableModel.
    """
    names = {module: name for name, module in model.named_modules()}
    plan = list(model.pp_plan or {})
    layers = find_layers(model, plan)
    embedding, head = names[model.get_input_embeddings()], names.get(model.get_output_embeddings())
    if head is None:
        raise UnservableModel("it has no head that a last stage could have (PIPELINE_PARALLEL_SIZE)")
    after = plan[plan.index(layers) + 1 :] if layers in plan else []
    tail = [head, *(name for name in after if name != head)]
    layer_bytes = [num_bytes(layer) for layer in model.get_submodule(layers)]
    tail_bytes = sum(num_bytes(model.get_submodule(name)) for name in tail)
    intervals = split_layers(layer_bytes, num_bytes(model.get_submodule(embedding)), tail_bytes, num_stages)
    return StagePlan(layers, intervals, embedding, head, tail, bool(model.config.tie_word_embeddings))


def find_layers(model: Any, plan: Sequence[str]) -> str:
    """The name of the list of layers: the one that the plan names, else the only one of the right length."""
    lists = {
        name: len(module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and not re.search(r"\.\d+(\.|$)", name)
    }
    total = model.config.num_hidden_layers
    found = [name for name in lists if name in plan] or [
        name for name, count in lists.items() if count and total % count == 0
    ]
    if len(found) != 1:
        raise UnservableModel(
            "its layers are not one list, which could be split into stages (PIPELINE_PARALLEL_SIZE)"
        )
    return str(found[0])


def num_bytes(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


class StageEnd(Exception):
    """Raised within a model where a stage ends; `states` [1, tokens, hidden] go to the next stage."""

    def __init__(self, states: torch.Tensor) -> None:
        self.states = states


@dataclass(slots=True, eq=False)
class ModelStage:
    """One stage, while it runs.

    Attributes:
        number, num_stages: which of how many.
        begin, end, num_layers: its layers, of how many.
        first_layer: module of the layer `begin`.
        gives_tuples: the model's layers return tuples; the hidden states are the first of each.
        states: what the stage before it sent: [1, tokens, hidden] of the model's dtype.
    """

    number: int = 0
    num_stages: int = 1
    begin: int = 0
    end: int = 1
    num_layers: int = 1
    first_layer: Any = None
    gives_tuples: bool = False
    states: torch.Tensor = field(default_factory=lambda: torch.empty(0, 0, 0))

    @property
    def is_first(self) -> bool:
        return self.number == 0

    @property
    def is_last(self) -> bool:
        return self.number == self.num_stages - 1

    def part_of(self, num_attentions: int) -> slice:
        """Which attention modules of the whole model it has; some models have several in a layer."""
        each = num_attentions // self.num_layers
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
        return (self.stage.states, None) if self.stage.gives_tuples else self.stage.states


class RemoteEmbedding(nn.Module):
    """Stands for the embedding of the first stage. It gives NaN, since nothing may depend on it."""

    def __init__(self, stage: ModelStage) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids int64 [1, tokens] → [1, tokens, hidden] of the model's dtype"""
        return self.stage.states.new_full((), torch.nan).expand(self.stage.states.shape)


def make_stage(plan: StagePlan, number: int) -> ModelStage:
    begin, end = plan.intervals[number]
    return ModelStage(number, len(plan.intervals), begin, end, plan.intervals[-1][1])


def changed_class(whole: type[Any], change: Callable[[Any], None]) -> type[Any]:
    """The class of a model → a class whose models are changed as soon as they are made, before weights are
    read. It keeps the name by which transformers finds its conversions.
    """

    def __init__(self: Any, *arguments: Any, **options: Any) -> None:
        whole.__init__(self, *arguments, **options)
        change(self)

    return type(whole.__name__, (whole,), {"__init__": __init__, "__module__": whole.__module__})


def remove_others(model: Any, plan: StagePlan, stage: ModelStage) -> None:
    """Replace what other stages have."""
    layers = model.get_submodule(plan.layers)
    stage.first_layer = layers[stage.begin]
    for number, layer in enumerate(layers):
        if not stage.begin <= number < stage.end:
            layers[number] = RemoteLayer(layer, stage, is_before=number < stage.begin)
    if not stage.is_first:
        model.set_submodule(plan.embedding, RemoteEmbedding(stage))
    for name in () if stage.is_last else plan.tail:
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


def learn_form(model: Any, stage: ModelStage, forward: Callable[[], object]) -> None:
    """Find out whether the model's code takes hidden states from a layer or from a tuple that it returns, by
    what reaches the stage's first layer if those before it return no tuples.
    """
    shapes: list[int] = []

    def note(module: Any, arguments: Any, options: Any) -> None:
        states = arguments[0] if arguments else options["hidden_states"]
        shapes.append(states.dim())

    if stage.is_first:
        return
    hook = stage.first_layer.register_forward_pre_hook(note, with_kwargs=True)
    with contextlib.suppress(Exception):
        forward()
    hook.remove()
    stage.gives_tuples = shapes != [3]
