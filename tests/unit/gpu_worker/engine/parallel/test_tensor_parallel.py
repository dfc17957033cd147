"""One model on several ranks: the ids of transformers' `generate`, however heads, experts and vocabulary
divide; or a refusal.
"""

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from common.messages.request import BeamParams, SamplingParams
from common.settings.settings import SettingError, Settings
from gpu_worker.engine.engine import Engine
from gpu_worker.engine.parallel.communicator import Communicator
from gpu_worker.engine.parallel.shards import split_evenly, split_heads
from gpu_worker.protocol import UnservableModel
from tests.support.engine import multi_rank_engine, rank_memory, tiny_models
from tests.support.engine.multi_rank_engine import (
    LENGTHS,
    NEW_TOKENS,
    SETTINGS,
    Led,
    check_grammar,
    check_ids,
    check_prompt_logprobs,
    play,
    player,
    prompts,
)
from tests.support.engine.tiny_models import FAMILIES, LLAMA, SEEING, VOCAB
from tests.support.pooling.pooled_ranks import check_vectors

MODELS = (
    FAMILIES
    | SEEING
    | {
        "one K head": ("Llama", LLAMA | {"num_key_value_heads": 1, "vocab_size": VOCAB + 1}),
        "three K heads": (
            "Llama",
            LLAMA
            | {
                "num_attention_heads": 6,
                "num_key_value_heads": 3,
                "hidden_size": 96,
                "tie_word_embeddings": True,
                "vocab_size": 99,
            },
        ),
        "biases": ("Llama", LLAMA | {"attention_bias": True, "mlp_bias": True}),
    }
)
QUICK = ("three K heads",)
PLANNED = (
    "one K head",
    "Mixtral",
    "Llama",
    "Llama-dynamic",
    "Mistral",
    "Qwen2",
    "Qwen3",
    "Qwen3-MoE",
    "Gemma2",
    "Gemma3",
    "Phi",
    "Phi3",
    "GPT-NeoX",
    "StarCoder2",
)
PLANNED += ("biases", "OLMo2", "Cohere", "Cohere2", "Granite", "SmolLM3", "DeepSeek-V3", "Gemma3-images")  # type: ignore[assignment]
REFUSED = {
    "GPT2": (FAMILIES["GPT2"], "no plan for gpt2"),
    "gpt-oss": (FAMILIES["gpt-oss"], "no plan for gpt_oss"),
    "one head": (
        ("Llama", LLAMA | {"num_attention_heads": 1, "num_key_value_heads": 1}),
        "1 attention heads, fewer than NUM_SHARD",
    ),
}


@pytest.fixture(scope="module")
def two() -> Iterator[Communicator]:
    with multi_rank_engine.running(2) as ranks:
        yield ranks


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [3, 4])
def test_ids_on_ranks_that_do_not_divide_the_heads(world_size: int, tmp_path: Path) -> None:
    """Before `two` ranks stay for the others: a process is in one group at a time."""
    with multi_rank_engine.running(world_size) as ranks:
        for family in ("Llama", "one K head", "three K heads", "Qwen3-MoE", "Phi3", "GPT-NeoX"):
            check_ids(ranks, MODELS[family], tmp_path / family)


@pytest.mark.parametrize(
    "family", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in PLANNED)]
)
def test_ids_on_two_ranks_equal_generate(two: Communicator, family: str, tmp_path: Path) -> None:
    check_ids(two, MODELS[family], tmp_path)


def test_sampled_ids_are_those_of_one_rank(two: Communicator, tmp_path: Path) -> None:
    tiny_models.save(tmp_path, *FAMILIES["Llama"])
    settings = SETTINGS | {"model_id": str(tmp_path), "threads": 1}
    options = {
        "sampling": SamplingParams(temperature=1.0, top_p=0.95, seed=7, repetition_penalty=1.1),
        "top_n_tokens": 2,
    }
    rows = dict(enumerate(prompts(VOCAB)))
    expected = play(Engine(Settings(**settings)), rows, **options)  # type: ignore[arg-type]
    with Led(two, **settings) as engine:
        assert play(engine, rows, **options) == expected  # type: ignore[arg-type]


@pytest.mark.slow
def test_sequences_of_beam_searches_are_those_of_one_rank(two: Communicator, tmp_path: Path) -> None:
    """Rank 0 finds the continuations, and the other takes them."""
    tiny_models.save(tmp_path, *FAMILIES["Llama"])
    settings = SETTINGS | {"model_id": str(tmp_path), "threads": 1}
    sampling = SamplingParams(repetition_penalty=1.2)

    def sequences_of(engine: Any) -> dict[int, list[tuple[list[int], str]]]:
        played = player(engine, 7)
        played.run(
            [
                played.start(
                    row, ids, NEW_TOKENS, stop_ids=[*range(3, 99, 9)], beams=BeamParams(4), sampling=sampling
                )
                for row, ids in enumerate(prompts(VOCAB))
            ]
        )
        found = played.sequences.items()
        return {row: [(one.ids, one.reason) for one in sequences] for row, sequences in found}

    expected = sequences_of(Engine(Settings(**settings)))
    with Led(two, **settings) as engine:
        assert sequences_of(engine) == expected


def test_ids_of_a_cache_of_8_bit_floats_are_those_of_one_rank(two: Communicator, tmp_path: Path) -> None:
    """Whole and resumed."""
    tiny_models.save(tmp_path, *FAMILIES["Llama"])
    settings = SETTINGS | {"model_id": str(tmp_path), "threads": 1, "kv_cache_dtype": "fp8_e4m3"}
    rows = dict(enumerate(prompts(VOCAB)))
    expected = play(Engine(Settings(**settings)), rows)
    with Led(two, **settings) as engine:
        assert play(engine, rows) == expected
        resumed = play(engine, {row: prompt + expected[row][:9] for row, prompt in rows.items()}, base=9)
        assert resumed == {row: ids[9:] for row, ids in expected.items()}


def test_rows_with_a_grammar_have_the_ids_of_one_rank(two: Communicator, tmp_path: Path) -> None:
    check_grammar(two, tmp_path)


def test_vectors_are_those_of_the_whole_model(two: Communicator, tmp_path: Path) -> None:
    check_vectors(two, tmp_path)


def test_prompt_logprobs_are_those_of_one_rank(two: Communicator, tmp_path: Path) -> None:
    check_prompt_logprobs(two, tmp_path)


def test_logits_are_those_of_one_rank(two: Communicator, tmp_path: Path) -> None:
    """Whole ones, from rank 0."""

    def logits_of(engine: Any) -> dict[int, dict[int, bytes]]:
        played = player(engine, 7)
        numbered = enumerate(prompts(VOCAB))
        span = (0, 100, "float32")
        played.run([played.start(row, ids, 2, ignore_eos=True, logits=span) for row, ids in numbered])
        return played.logits

    tiny_models.save(tmp_path, *FAMILIES["Llama"])
    settings = SETTINGS | {"model_id": str(tmp_path), "threads": 1}
    expected = logits_of(Engine(Settings(**settings)))
    with Led(two, **settings) as engine:
        found = logits_of(engine)
    for row, pieces in expected.items():
        assert found[row].keys() == pieces.keys()
        for first, values in pieces.items():
            np.testing.assert_allclose(
                np.frombuffer(found[row][first], "<f4"), np.frombuffer(values, "<f4"), rtol=1e-4, atol=1e-4
            )


@pytest.mark.parametrize("family", REFUSED)
def test_unsplittable_models_are_refused(two: Communicator, family: str, tmp_path: Path) -> None:
    (config, sizes), words = REFUSED[family]
    tiny_models.save(tmp_path, config, sizes)
    with pytest.raises(SettingError, match=words) as caught:
        Led(two, model_id=str(tmp_path), threads=1, **SETTINGS)
    assert caught.value.name == "model_id" and "\n" not in str(caught.value)


def test_weights_that_transformers_dequantises_are_not_split(two: Communicator, tmp_path: Path) -> None:
    tiny_models.save(tmp_path, *FAMILIES["Llama"])
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"quantization_config": {"quant_method": "hqq"}})
    )
    with pytest.raises(SettingError, match=r"NUM_SHARD: 2, but .* is quantised \(hqq\)"):
        Led(two, model_id=str(tmp_path), threads=1, **SETTINGS)


def test_a_rank_holds_half_of_the_split_parameters(two: Communicator, tmp_path: Path) -> None:
    """Half of the matrices of layers, experts and vocabulary; only the router's and the norms' weights are
    whole.
    """
    whole = tiny_models.save(tmp_path, *FAMILIES["Mixtral"])
    with Led(two, model_id=str(tmp_path), threads=1, **SETTINGS) as engine:
        held = {name: weight.numel() for name, weight in engine.engine.loaded.model.named_parameters()}
    for name, weight in whole.named_parameters():
        if name in held:  # packed ones have their own names
            halved = weight.dim() > 1 and not name.endswith("gate.weight")
            assert held[name] == (
                weight.numel() * 192 // VOCAB if "embed" in name else weight.numel() // (1 + halved)
            ), name
    assert [name for name in held if "experts" in name]


def test_each_rank_makes_its_part_of_dummy_weights(two: Communicator, tmp_path: Path) -> None:
    whole = tiny_models.save(tmp_path, *FAMILIES["Mixtral"])
    (tmp_path / "model.safetensors").unlink()
    with Led(two, model_id=str(tmp_path), load_format="dummy", threads=1, **SETTINGS) as engine:
        held = engine.engine.loaded.model.model.layers[0].mlp.experts.down_proj
        assert (
            held.numel() == whole.model.layers[0].mlp.experts.down_proj.numel() / 2
            and torch.isfinite(held.detach()).all()
        )
        assert [len(ids) for ids in play(engine, dict(enumerate(prompts(VOCAB)))).values()] == [
            NEW_TOKENS
        ] * len(LENGTHS)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux tells a process what it takes")
def test_a_rank_reads_and_allocates_its_part_only(tmp_path: Path) -> None:
    """Of a checkpoint in several files. Norms are read by both ranks; the interpreter, and what one layer's
    packing takes, by each.
    """
    total = rank_memory.write(tmp_path, 128 * rank_memory.MIB)
    [alone], ranks = rank_memory.measure(tmp_path, 1), rank_memory.measure(tmp_path, 2)
    assert alone.read == total and total < sum(rank.read for rank in ranks) < 1.001 * total
    assert all(
        rank.read < 0.51 * total and rank.peak < 0.75 * alone.peak and rank.kept < 0.7 * alone.kept
        for rank in ranks
    )


@pytest.mark.parametrize("size", [1, 7, 64, 100, 500, 49_152, 151_936])
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_shares_are_even(size: int, world_size: int) -> None:
    shares = split_evenly(size, world_size)
    assert shares[0][0] == 0 and shares[-1][1] == size and len(shares) == world_size
    assert all(end == begin for (_, end), (begin, _) in pairwise(shares))
    widths = [end - begin for begin, end in shares]
    assert max(widths) - min(widths) < 2 * max(1, min(64, size // world_size))
    assert all(begin % 8 == 0 for begin, _ in shares) or size < 8 * world_size


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


@pytest.mark.slow
def test_too_many_ranks_for_the_heads() -> None:
    assert all(end > begin for begin, end in split_heads(6, 3, 6)[0])
    with pytest.raises(UnservableModel, match="NUM_SHARD"):
        split_heads(6, 3, 7)
