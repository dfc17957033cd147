"""Which part of a model each rank has: shares of heads and matrices, and stages of layers."""

from itertools import pairwise
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from gpu_worker.engine.parallel.shards import make_tp_plan, split_heads
from gpu_worker.engine.parallel.stages import split_layers
from tests.support.engine.tiny_models import FAMILIES


@pytest.mark.parametrize("family", ["DeepSeek-V2", "DeepSeek-V3"])
def test_ranks_share_the_heads_of_latent_attention(family: str) -> None:
    """Also where transformers' plan leaves attention whole; what makes latents is whole on each rank."""
    kind, sizes = FAMILIES[family]
    config = getattr(transformers, f"{kind}Config")(**sizes)
    from_config = AutoModelForCausalLM.from_config
    with torch.device("meta"):
        model = from_config(config)  # type: ignore[no-untyped-call]
    own = "model.layers.1.self_attn"
    shards = {
        name.removeprefix(f"{own}."): (of_ranks.dim, of_ranks.intervals)
        for name, of_ranks in make_tp_plan(model, 2).shards.items()
        if name.startswith(own)
    }
    queries = "q_b_proj" if sizes["q_lora_rank"] else "q_proj"
    assert shards == {
        f"{queries}.weight": (0, [(0, 48), (48, 96)]),
        "kv_b_proj.weight": (0, [(0, 56), (56, 112)]),
        "o_proj.weight": (1, [(0, 24), (24, 48)]),
    }


@pytest.mark.parametrize(
    ("query_heads", "kv_heads", "world_size", "queries", "kept"),
    [
        (8, 8, 2, [(0, 4), (4, 8)], [(0, 4), (4, 8)]),
        (9, 3, 2, [(0, 3), (3, 9)], [(0, 1), (1, 3)]),
        (4, 2, 4, [(0, 1), (1, 2), (2, 3), (3, 4)], [(0, 1), (0, 1), (1, 2), (1, 2)]),
        (14, 2, 4, [(0, 3), (3, 7), (7, 10), (10, 14)], [(0, 1), (0, 1), (1, 2), (1, 2)]),
        (4, 2, 3, [(0, 1), (1, 2), (2, 4)], [(0, 1), (0, 1), (1, 2)]),
        (8, 1, 3, [(0, 2), (2, 5), (5, 8)], [(0, 1), (0, 1), (0, 1)]),
    ],
)
def test_heads_are_split_by_groups(
    query_heads: int, kv_heads: int, world_size: int, queries: Any, kept: Any
) -> None:
    assert split_heads(query_heads, kv_heads, world_size) == (queries, kept)


@pytest.mark.parametrize(
    ("layers", "first", "last", "stages", "intervals"),
    [
        ([1] * 8, 0, 0, 2, [(0, 4), (4, 8)]),
        ([1] * 8, 0, 0, 3, [(0, 3), (3, 6), (6, 8)]),
        ([1] * 8, 4, 4, 2, [(0, 4), (4, 8)]),
        ([1] * 8, 0, 4, 2, [(0, 6), (6, 8)]),
        ([1] * 8, 3, 0, 4, [(0, 1), (1, 3), (3, 5), (5, 8)]),
        ([9, 1, 1, 1], 0, 0, 2, [(0, 1), (1, 4)]),
        ([1, 1, 1], 100, 100, 3, [(0, 1), (1, 2), (2, 3)]),
        ([5], 1, 1, 1, [(0, 1)]),
    ],
)
def test_the_largest_stage_is_as_small_as_possible(
    layers: list[int], first: int, last: int, stages: int, intervals: list[tuple[int, int]]
) -> None:
    found = split_layers(layers, first, last, stages)
    assert largest(layers, first, last, found) == largest(layers, first, last, intervals)
    assert found[0][0] == 0 and found[-1][1] == len(layers)
    assert all(begin < end for begin, end in found)
    assert all(end == begin for (_, end), (begin, _) in pairwise(found))


def largest(layers: list[int], first: int, last: int, intervals: list[tuple[int, int]]) -> int:
    sizes = [first + layers[0], *layers[1:]]
    sizes[-1] += last
    return max(sum(sizes[begin:end]) for begin, end in intervals)
