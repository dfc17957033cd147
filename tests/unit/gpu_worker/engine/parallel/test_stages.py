"""Stages of a pipeline: which layers and tensors each has."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from gpu_worker.engine.parallel.stages import StagePlan, make_stage_plan, split_layers
from gpu_worker.protocol import UnservableModel
from tests.support.engine.tiny_models import FAMILIES


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


def test_each_stage_has_a_layer() -> None:
    with pytest.raises(UnservableModel, match=r"3 layers, fewer than PIPELINE_PARALLEL_SIZE \(4\)"):
        split_layers([1] * 3, 0, 0, 4)


def plan_of(family: str, num_stages: int = 2, **sizes: Any) -> StagePlan:
    name, known = FAMILIES[family]
    config = AutoConfig.for_model(MODEL_TYPES[name], **known | sizes)
    with torch.device("meta"):
        return make_stage_plan(AutoModelForCausalLM.from_config(config), num_stages)  # type: ignore[no-untyped-call]


MODEL_TYPES = {"Llama": "llama", "GPT2": "gpt2", "GPTNeoX": "gpt_neox"}


@pytest.mark.parametrize(
    ("family", "layers", "embedding", "tail"),
    [
        ("Llama", "model.layers", "model.embed_tokens", ["lm_head", "model.norm"]),
        ("GPT-NeoX", "gpt_neox.layers", "gpt_neox.embed_in", ["lm_head", "gpt_neox.final_layer_norm"]),
        ("GPT2", "transformer.h", "transformer.wte", ["lm_head"]),
    ],
)
def test_names_come_from_the_models_plan_or_from_its_only_list(
    family: str, layers: str, embedding: str, tail: list[str]
) -> None:
    plan = plan_of(family)
    assert (plan.layers, plan.embedding, [*plan.tail]) == (layers, embedding, tail)


def test_first_and_last_stage_have_what_is_before_and_after_the_layers() -> None:
    plan = plan_of("Llama", 3)
    assert [plan.has(stage, "model.embed_tokens.weight") for stage in range(3)] == [True, False, False]
    for name in ("lm_head.weight", "model.norm.weight"):
        assert [plan.has(stage, name) for stage in range(3)] == [False, False, True]
    assert [plan.has(1, f"model.layers.{layer}.mlp.up_proj.weight") for layer in range(3)] == [
        False,
        True,
        False,
    ]
    assert not plan.has(2, "model.layers.12.mlp.up_proj.weight"), "a layer beyond the config's"
    assert all(plan_of("GPT2").has(stage, "transformer.wpe.weight") for stage in range(2))


def test_a_head_that_is_the_embedding_weighs_in_both_stages() -> None:
    heavy = {"num_hidden_layers": 8, "vocab_size": 3000, "tie_word_embeddings": True}
    plan = plan_of("Llama", 3, **heavy)
    assert plan.is_tied
    begins = [end - begin for begin, end in plan.intervals]
    assert begins[1] > begins[0] and begins[1] > begins[2]
