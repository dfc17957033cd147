"""One model in stages: the ids of transformers' `generate` and of one rank, whatever is asked of the rows; or
a refusal.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from common.messages.records import unpack_floats
from common.messages.request import BeamParams, SamplingParams
from common.rank import RankInfo
from common.settings.settings import SettingError, Settings
from gpu_worker.engine.attention.choose import check_probe
from gpu_worker.engine.attention.kv_cache import AttentionSpec, LayerSpec
from gpu_worker.engine.batch.step_result import PromptLogprobs, TopLogprobs
from gpu_worker.engine.engine import Engine
from gpu_worker.engine.in_flight import StepSamples, pack_samples, unpack_sent_samples
from gpu_worker.engine.parallel.communicator import Communicator
from gpu_worker.engine.parallel.stages import ModelStage, checked_layers
from gpu_worker.engine.pipeline import PipelineEngine
from gpu_worker.protocol import UnservableModel
from tests.support.engine import multi_rank_engine, tiny_models
from tests.support.engine.multi_rank_engine import (
    SETTINGS,
    Led,
    check_grammar,
    check_ids,
    check_prompt_logprobs,
    play,
    player,
    prompts,
)
from tests.support.engine.tiny_models import FAMILIES, LLAMA, VOCAB
from tests.support.pooling.pooled_ranks import check_vectors

QUICK = ("Llama-tied", "GPT2")
"""A tied head, and no plan."""
SPECULATED = SamplingParams(allowed_token_ids=[5, 6, 7])
"""With three tokens to choose from, many proposals are right, and many are wrong."""


@pytest.fixture(scope="module")
def two() -> Iterator[Communicator]:
    with multi_rank_engine.running(2, num_stages=2) as ranks:
        yield ranks


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "num_stages"), [(4, 2), (3, 3)])
def test_ids_of_more_ranks(world_size: int, num_stages: int, tmp_path: Path) -> None:
    """Two stages of two ranks each, and three stages. Before `two` ranks stay for the others."""
    with multi_rank_engine.running(world_size, num_stages) as ranks:
        assert (ranks.tp_size, ranks.sampler) == (world_size // num_stages, world_size - ranks.tp_size)
        for family in ("Llama", "Llama-tied", "Qwen3-MoE", "Gemma2"):
            check_ids(ranks, FAMILIES[family], tmp_path / family)


@pytest.mark.parametrize(
    "family",
    [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES if name not in QUICK)],
)
def test_ids_in_two_stages_equal_generate(two: Communicator, family: str, tmp_path: Path) -> None:
    check_ids(two, FAMILIES[family], tmp_path)


def test_rows_sample_as_on_one_rank(two: Communicator, tmp_path: Path) -> None:
    """Sampled with seeds and penalties, with log-probabilities; with proposals; and greedy with both."""
    tiny_models.save(tmp_path, *FAMILIES["Llama"])
    settings = SETTINGS | {"model_id": str(tmp_path), "threads": 1}
    rows = dict(enumerate(prompts(VOCAB)))
    sampled = SamplingParams(temperature=1.0, top_p=0.95, seed=7, repetition_penalty=1.1)
    alone = Engine(Settings(**settings))
    with Led(two, speculate=3, **settings) as engine:
        for sampling in (sampled, SPECULATED, replace(SPECULATED, temperature=1.0, seed=3)):
            expected = player(alone)
            played = player(engine)
            for each in (expected, played):
                each.run(
                    [
                        each.start(row, ids, 24, ignore_eos=True, sampling=sampling, top_n_tokens=2)
                        for row, ids in rows.items()
                    ]
                )
            assert played.ids == expected.ids
            assert played.top_logprobs.keys() == expected.top_logprobs.keys()
            for place, tops in expected.top_logprobs.items():
                assert played.top_logprobs[place] == pytest.approx(tops, abs=1e-4)
        assert sum(step.proposed_tokens for step in played.steps) > 20


@pytest.mark.slow
def test_rows_with_a_grammar_have_the_ids_of_one_rank(two: Communicator, tmp_path: Path) -> None:
    check_grammar(two, tmp_path)


def test_vectors_are_those_of_the_whole_model(two: Communicator, tmp_path: Path) -> None:
    check_vectors(two, tmp_path)


def test_prompt_logprobs_are_those_of_one_rank(two: Communicator, tmp_path: Path) -> None:
    check_prompt_logprobs(two, tmp_path)


def test_beam_searches_and_logits_are_those_of_one_rank(two: Communicator, tmp_path: Path) -> None:
    """Beside each other, and beside a plain row; each search is in one micro-batch a step."""

    def run(engine: Any) -> Any:
        played = player(engine, 7)
        first, second, third = prompts(VOCAB)
        played.run(
            [
                played.start(1, first, 12, beams=BeamParams(3, 0.6), stop_ids=[5, 9, 30], ignore_eos=True),
                played.start(2, second, 12, beams=BeamParams(2), ignore_eos=True),
                played.start(3, third, 5, logits=(0, len(third) + 4, "float32"), ignore_eos=True),
                played.start(4, first, 12, ignore_eos=True),
            ]
        )
        return played

    tiny_models.save(tmp_path, *FAMILIES["Llama"])
    settings = SETTINGS | {"model_id": str(tmp_path), "threads": 1}
    expected = run(Engine(Settings(**settings)))
    with Led(two, **settings) as engine:
        played = run(engine)
    assert played.ids[4] == expected.ids[4]
    for number in (1, 2):
        found, wanted = played.sequences[number], expected.sequences[number]
        assert [one.ids for one in found] == [one.ids for one in wanted]
        assert [one.score for one in found] == pytest.approx([one.score for one in wanted], abs=1e-4)
    values, others = (
        unpack_floats(b"".join(one.logits[3][first] for first in sorted(one.logits[3])))
        for one in (played, expected)
    )
    assert values == pytest.approx(others, abs=1e-4)
    assert len(played.free) == len(expected.free)


def test_a_cache_of_8_bit_floats_and_rounded_weights_give_the_ids_of_one_rank(
    two: Communicator, tmp_path: Path
) -> None:
    tiny_models.save(tmp_path, *FAMILIES["Llama"])
    settings = SETTINGS | {"model_id": str(tmp_path), "threads": 1, "kv_cache_dtype": "fp8_e4m3"}
    settings |= {"quantize": "fp8"}
    rows = dict(enumerate(prompts(VOCAB)))
    expected = play(Engine(Settings(**settings)), rows)
    with Led(two, **settings) as engine:
        assert play(engine, rows) == expected


def test_a_stage_has_its_part_of_weights_and_cache(two: Communicator, tmp_path: Path) -> None:
    """KV_CACHE_BYTES is for all stages, and each has room for equally many tokens."""
    tiny_models.save(tmp_path, *FAMILIES["Llama-tied"])
    settings = SETTINGS | {"model_id": str(tmp_path), "threads": 1}
    whole = Engine(Settings(**settings))
    with Led(two, **settings) as led:
        engine = led.engine
        assert isinstance(engine, PipelineEngine)
        assert led.ready.num_blocks == pytest.approx(whole.ready.num_blocks, abs=2)
        stage, loaded = engine.loaded.stage, engine.loaded
        assert (stage.begin, stage.is_first, stage.is_last) == (0, True, False)
        assert 0 < len(loaded.geometry.layers) == stage.end < len(whole.loaded.geometry.layers)
        held = {name.partition(".weight")[0] for name, _ in loaded.model.named_parameters()}
        assert "model.embed_tokens" in held
        assert not {name for name in held if "lm_head" in name or name == "model.norm"}


def test_as_many_micro_batches_as_stages_are_in_flight(two: Communicator, tmp_path: Path) -> None:
    tiny_models.save(tmp_path, *FAMILIES["Llama"])
    with Led(two, model_id=str(tmp_path), threads=1, **SETTINGS) as led:
        engine = led.engine
        assert isinstance(engine, PipelineEngine)
        seen: list[list[list[int]]] = []
        read = engine.read

        def noted(batch: Any) -> float:
            pending = [batch, *engine.pending]
            seen.append([[part.row.number for part in one.launched.slices] for one in pending])
            return read(batch)

        engine.read = noted  # type: ignore[method-assign]
        play(led, dict(enumerate(prompts(VOCAB) + prompts(VOCAB)[:1])))
    both = [batches for batches in seen if len(batches) == 2]
    assert len(both) > 20 and all(len(batches) <= 2 for batches in seen)
    assert all(not {*first} & {*second} or first[0] == second[0] for first, second in both)
    assert sum(sorted(map(len, batches)) == [2, 2] for batches in both) > 10


def test_each_stage_makes_its_part_of_dummy_weights(two: Communicator, tmp_path: Path) -> None:
    tiny_models.save(tmp_path, *FAMILIES["Llama-tied"])
    (tmp_path / "model.safetensors").unlink()
    with Led(two, model_id=str(tmp_path), load_format="dummy", threads=1, **SETTINGS) as engine:
        rows = dict(enumerate(prompts(VOCAB)))
        assert play(engine, rows) == play(engine, rows)


def test_a_model_with_fewer_layers_than_stages_is_refused(two: Communicator, tmp_path: Path) -> None:
    tiny_models.save(tmp_path, "Llama", LLAMA | {"num_hidden_layers": 1})
    words = r"1 layers, fewer than PIPELINE_PARALLEL_SIZE \(2\)"
    with pytest.raises(SettingError, match=words) as caught:
        Led(two, model_id=str(tmp_path), threads=1, **SETTINGS)
    assert caught.value.name == "model_id"


def test_weights_that_transformers_dequantises_are_refused(two: Communicator, tmp_path: Path) -> None:
    tiny_models.save(tmp_path, *FAMILIES["Llama"])
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "hqq"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(SettingError, match=r"PIPELINE_PARALLEL_SIZE: 2, but .* \(hqq\)"):
        Led(two, model_id=str(tmp_path), threads=1, **SETTINGS)


class Passing(torch.nn.Module):
    """A layer that gives the next one its own input, too: [1, tokens, hidden]."""

    def forward(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return states + 1, states


def test_models_whose_layers_need_more_than_hidden_states_are_refused() -> None:
    """By what a layer returns, or by what a later stage computes without the embeddings."""
    layer = Passing()
    with (
        checked_layers(ModelStage(0, 2, 0, 1, 2, layer)),
        pytest.raises(UnservableModel, match="hand on more"),
    ):
        layer(torch.zeros(1, 2, 3))
    assert len(layer(torch.zeros(1, 2, 3))) == 2, "the check is over"
    config = AutoConfig.for_model("llama", **LLAMA)
    spec = LayerSpec(AttentionSpec(2, 2, None, 1.0), 16, 16)
    states = torch.full((1, 8, 64), torch.nan)
    with pytest.raises(UnservableModel, match=r"take more than hidden states.*PIPELINE_PARALLEL_SIZE"):
        check_probe(SimpleNamespace(config=config), {Passing(): spec}, states, slice(2, 3))


def test_ranks_of_a_stage_are_neighbours() -> None:
    with pytest.raises(SettingError, match="PIPELINE_PARALLEL_SIZE: 2 does not divide the 3 ranks"):
        Communicator(RankInfo(0, 3), num_stages=2)


def test_samples_survive_the_way_to_another_rank() -> None:
    tops = {1: TopLogprobs([4, 5], [-0.5, float("-inf")])}
    samples = StepSamples([3, 4], [-0.25, -1.5], tops, [PromptLogprobs(b"12", b"", b"3")])
    assert unpack_sent_samples(pack_samples(samples)) == samples


@pytest.mark.slow
def test_more_bytes_than_one_message_has(two: Communicator, tmp_path: Path) -> None:
    """A grant of a long prompt."""
    tiny_models.save(tmp_path, *FAMILIES["Llama"])
    torch.manual_seed(3)
    prompt = torch.randint(3, VOCAB, (200,)).tolist()
    settings = SETTINGS | {"model_id": str(tmp_path), "threads": 1}
    rows = {row: prompt[row:] for row in range(6)}
    expected = play(Engine(Settings(**settings)), rows)
    with Led(two, **settings) as engine:
        assert play(engine, rows) == expected
