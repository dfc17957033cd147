"""Which part of each weight a rank holds, by the model's own plan (transformers' `tp_plan`).

A matrix is cut as its plan says: `colwise` along its outputs, `rowwise` along its inputs. What belongs to
heads is cut between heads, so that a rank computes whole ones: with more ranks than K and V heads, ranks
share one and split the queries that look at it. Parts need not be of the same size, so nothing has to divide.
"""

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import nn

from gpu_worker.protocol import UnservableModel

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
WHOLE = ("replicated_with_grad_allreduce", "mla_kv_a_proj", "replicate")
"""Styles about gradients only: every rank holds the whole parameter."""
KEYS_AND_VALUES = ("k_proj", "v_proj", "k_norm")
LATENT_STYLES = {"q_proj": "colwise", "q_b_proj": "colwise", "kv_b_proj": "colwise", "o_proj": "rowwise"}
"""Of latent attention, which some plans leave whole (DeepSeek-V3's): a rank has all latents and its heads."""

STATE_CALLS = {"update_conv_state", "update_recurrent_state"}
"""Methods of transformers' cache that mixers call (`states/mixers.py`)."""

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
    plan = {name: style for name, style in (model.tp_plan or {}).items() if style not in WHOLE}
    if not any("*" in name for name in plan):
        raise UnservableModel(
            f"transformers has no plan for {model.config.model_type} on several ranks (NUM_SHARD)"
        )
    if unknown := sorted({*plan.values()} - {*COLUMNS, *SUMMED}):
        raise UnservableModel(
            f"its plan for several ranks (NUM_SHARD) asks for {unknown[0]}, which is not served"
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
