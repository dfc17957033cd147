"""Rows with LoRA adapters do what rows of PEFT's merged models do; the cache of adapters.
Adapters that cannot be served are refused with the reason, and the engine goes on.
"""

import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.adapters import digest_of
from common.messages.request import BeamParams, SamplingParams
from common.rank import RankInfo
from gpu_worker.engine.engine import Engine
from gpu_worker.protocol import AdapterAnswer, SetAdapter
from tests.support.adapters.tiny_adapters import (
    COUNT,
    LINEARS,
    change_config,
    change_weights,
    check_adapters,
    expected_ids,
    load_adapters,
    merged,
    save_adapter,
)
from tests.support.engine import tiny_models
from tests.support.engine.batch_player import Player, player
from tests.support.engine.quantized_models import AWQ, awq
from tests.support.engine.quantized_models import save as save_quantised
from tests.support.engine.row_steps import plan, start_row
from tests.support.engine.tiny_engine import engine_of, play

ADAPTERS: dict[str, dict[str, Any]] = {
    "all": {},
    "attention": {"target_modules": ["q_proj", "v_proj"], "r": 8},
    "stable": {"use_rslora": True, "r": 6, "target_modules": "all-linear"},
    "patterns": {
        "rank_pattern": {"q_proj": 2, "layers.1.mlp.up_proj": 5},
        "alpha_pattern": {"o_proj": 3, "^model.layers.0.mlp.down_proj": 20},
        "target_modules": r".*\.[02]\..*_proj|.*layers\.1\.mlp\.up_proj",
    },
    "vocabulary": {"target_modules": [*LINEARS, "embed_tokens", "lm_head"]},
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("llama")
    return tiny_models.save(folder, *tiny_models.FAMILIES["Llama"]), folder


@pytest.fixture(scope="module")
def folders(llama: tuple[Any, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        name: save_adapter(llama[0], tmp_path_factory.mktemp(name), seed, **config)
        for seed, (name, config) in enumerate(ADAPTERS.items())
    }


def test_ids_of_rows_of_many_adapters_equal_those_of_merged_models(
    llama: tuple[Any, Path], folders: dict[str, Path]
) -> None:
    model, path = llama
    engine = engine_of(path)
    load_adapters(engine, folders)
    check_adapters(engine, model, folders, ["", *ADAPTERS])


@pytest.mark.parametrize(
    ("family", "layers"),
    [("Falcon", ["query_key_value", "dense"]), ("Phi-MoE-longrope", ["q_proj", "v_proj"])],
)
def test_linear_layers_of_a_familys_own_take_adapters_and_its_routers_do_not(
    family: str, layers: list[str], tmp_path: Path
) -> None:
    model = tiny_models.save(tmp_path / "model", *tiny_models.FAMILIES[family])
    adapter = save_adapter(model, tmp_path / "own", 1, target_modules=layers)
    engine = engine_of(tmp_path / "model")
    load_adapters(engine, {"own": adapter})
    assert play_named(engine, {1: "own"})[1] == ids_of(model, adapter) != ids_of(model, None)


@pytest.mark.slow
def test_an_adapter_of_a_quantised_model_is_added_to_its_products(tmp_path: Path) -> None:
    model = save_quantised(tmp_path / "model", awq, AWQ)
    folders = {"all": save_adapter(model, tmp_path / "all", 1)}
    engine = engine_of(tmp_path / "model")
    load_adapters(engine, folders)
    check_adapters(engine, model, folders, ["all"])


PROMPTS: Sequence[list[int]] = ([5, 6, 7, 8] * 6, list(range(40, 70)))
NUM_NEW = 12
FEATURES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"sampling": SamplingParams(temperature=0.9, top_p=0.9, seed=3)},
    "scored prompt": {"prompt_logprobs": 2},
    "beams": {"beams": BeamParams(3)},
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """Folders of a model, an adapter, and of both merged."""
    model, adapter, both = (tmp_path_factory.mktemp(name) for name in ("model", "adapter", "both"))
    base = tiny_models.save(model, *tiny_models.FAMILIES["Llama"])
    save_adapter(base, adapter, 1)
    tiny_models.save(both, *tiny_models.FAMILIES["Llama"])
    merged(base, adapter).save_pretrained(both)
    return model, adapter, both


def play_beside(engine: Engine, adapter: str, **params: Any) -> Player:
    """Rows of the prompts, and beside them one without an adapter."""
    played = player(engine, 20)
    starts = [
        played.start(row, prompt, NUM_NEW, ignore_eos=True, adapter=adapter, **params)
        for row, prompt in enumerate(PROMPTS)
    ]
    played.run([*starts, played.start(9, PROMPTS[0], NUM_NEW, ignore_eos=True)])
    return played


def check_equal(found: Player, expected: Player) -> None:
    for row in range(len(PROMPTS)):
        assert found.ids[row] == expected.ids[row]
        ids, wanted = (
            [sequence.ids for sequence in played.sequences.get(row, ())] for played in (found, expected)
        )
        assert ids == wanted
        scores = expected.prompt_logprobs.get(row, [])
        assert found.prompt_logprobs.get(row, []) == pytest.approx(scores, abs=1e-4)


@pytest.mark.slow
def test_rows_with_an_adapter_do_what_rows_of_the_merged_model_do(made: tuple[Path, Path, Path]) -> None:
    model, adapter, both = made
    engine, other = engine_of(model, speculate=3), engine_of(both, speculate=3)
    load_adapters(engine, {"a": adapter})
    for params in FEATURES.values():
        check_equal(play_beside(engine, "a", **params), play_beside(other, "", **params))
    assert play_beside(engine, "a").num_proposed > 0


def test_adapters_are_there_when_a_model_wakes(made: tuple[Path, Path, Path]) -> None:
    model, adapter, _ = made
    engine = engine_of(model)
    load_adapters(engine, {"a": adapter})
    before = play_beside(engine, "a").ids
    engine.sleep()
    engine.wake_up(lambda text: None)
    assert play_beside(engine, "a").ids == before


NAMES = ["a", "b", "c", "d", "e"]
PROMPT = list(range(3, 23))


@pytest.fixture
def named(llama: tuple[Any, Path], tmp_path: Path) -> dict[str, Path]:
    return {name: save_adapter(llama[0], tmp_path / name, seed) for seed, name in enumerate(NAMES)}


def play_named(engine: Engine, names: dict[int, str]) -> dict[int, list[int]]:
    """The ids of rows with these adapters."""
    params = {row: {"adapter": name} for row, name in names.items()}
    return play(engine, dict.fromkeys(names, PROMPT), new_tokens=COUNT, params=params)


def ids_of(model: Any, folder: Path | None) -> list[int]:
    return expected_ids(model, folder, [PROMPT], COUNT)[0]


@pytest.mark.slow
def test_rows_of_more_adapters_than_slots_all_end_with_their_own_ids(
    llama: tuple[Any, Path], named: dict[str, Path]
) -> None:
    engine = engine_of(llama[1], max_loras=2, max_cpu_loras=3)
    load_adapters(engine, named)
    rows = dict(enumerate([*NAMES, "", *NAMES]))
    expected = {name: ids_of(llama[0], named.get(name)) for name in ["", *NAMES]}
    assert play_named(engine, rows) == {number: expected[name] for number, name in rows.items()}
    assert engine.adapters and len(engine.adapters.host) == 3, "two of the five were read again"
    assert sorted(adapter.slot for adapter in engine.adapters.used) == [0, 1]


def test_an_adapter_that_is_unloaded_while_rows_have_it_serves_them_and_no_others(
    llama: tuple[Any, Path], named: dict[str, Path]
) -> None:
    engine = engine_of(llama[1])
    load_adapters(engine, {"a": named["a"]})
    played = Player(engine, list(range(1, 50)), until=100)
    start = played.start(1, PROMPT, COUNT, ignore_eos=True, adapter="a")
    engine.apply(plan(100, 64, [start]))
    engine.apply(plan(100, 64, blocks=played.grow(COUNT, 1)))
    first = engine.step()
    assert first and first.num_samples == 1
    assert engine.obey(SetAdapter("a")) == AdapterAnswer("a")
    assert engine.obey(SetAdapter("a", str(named["b"]))) == AdapterAnswer("a")
    later = played.start(2, PROMPT, COUNT, ignore_eos=True, adapter="a")
    engine.apply(plan(100, 64, [later]))
    engine.apply(plan(100, 64, blocks=played.grow(COUNT, 2)))
    for step in [first, *iter(engine.step, None)]:
        played.collect(step)
    assert played.ids[1] == ids_of(llama[0], named["a"])
    assert played.ids[2] == ids_of(llama[0], named["b"])
    engine.obey(SetAdapter("other"))
    assert len(engine.adapters.host) == 1, "nothing is left of the first"


def test_a_row_whose_adapter_is_not_loaded_ends(llama: tuple[Any, Path]) -> None:
    engine = engine_of(llama[1])
    engine.apply(plan(9, 64, [start_row(1, PROMPT, COUNT, blocks=[1, 2, 3, 4], adapter="gone")]))
    step = engine.step()
    assert step and [*step.ended, *step.released] == [(1, "adapter", 0), (1, 0)]


def test_rows_of_an_adapter_whose_files_have_changed_end_and_others_go_on(
    llama: tuple[Any, Path], named: dict[str, Path]
) -> None:
    engine = engine_of(llama[1], max_loras=1, max_cpu_loras=1)
    load_adapters(engine, {"a": named["a"], "b": named["b"]})
    save_adapter(llama[0], named["a"], 9)
    played = player(engine)
    starts = [
        played.start(number, PROMPT, COUNT, ignore_eos=True, adapter=name)
        for number, name in enumerate(["a", "b", ""])
    ]
    ids = played.run(starts)
    assert played.ended[0] == ("adapter", 0) and not ids[0]
    assert ids[1] == ids_of(llama[0], named["b"]) and ids[2] == ids_of(llama[0], None)


def test_an_engine_that_takes_no_adapters_says_so(llama: tuple[Any, Path]) -> None:
    engine = engine_of(llama[1], enable_lora=False)
    assert engine.ready.max_loras == 0
    answer = engine.obey(SetAdapter("a", "/nowhere"))
    assert answer == AdapterAnswer("a", "this worker takes no adapters (ENABLE_LORA)")
    assert engine.obey(SetAdapter("a")) == AdapterAnswer("a")


def test_what_is_loaded_stays_where_its_successor_is_refused(
    llama: tuple[Any, Path], named: dict[str, Path]
) -> None:
    engine = engine_of(llama[1], max_loras=3, max_lora_rank=16)
    assert (engine.ready.max_loras, engine.ready.max_lora_rank, engine.adapters.num_kept) == (3, 16, 12)
    assert engine.obey(SetAdapter("a", str(named["a"]))) == AdapterAnswer("a")
    change_config(named["b"], use_dora=True)
    assert engine.obey(SetAdapter("a", str(named["b"]))) != AdapterAnswer("a")
    assert play_named(engine, {1: "a"})[1] == ids_of(llama[0], named["a"])


def test_a_rank_on_another_machine_takes_the_same_files_alone(
    llama: tuple[Any, Path], named: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0's agent has looked at its own machine only."""
    engine = engine_of(llama[1])
    monkeypatch.setattr(engine.adapters.communicator, "info", RankInfo(1, 2, 0, 1))
    own, other, digest = str(named["a"]), str(named["b"]), digest_of(named["a"])
    assert engine.obey(SetAdapter("a", "/cache/of/rank/0", own, digest)) == AdapterAnswer("a")
    assert engine.adapters.known["a"].folder == own
    for path, cause in ((other, "has other files than on the machine of rank 0"), ("/no", "no folder /no")):
        answer = engine.obey(SetAdapter("a", own, path, digest))
        assert answer and cause in answer.cause and f"on {socket.gethostname()}" in answer.cause


# --- refusals -----------------------------------------------------------------------------------------------

QUERY = "layers__0__self_attn__q_proj__lora_A__weight"
CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "another kind": ({"peft_type": "LOHA"}, "its peft_type is LOHA"),
    "DoRA": ({"use_dora": True}, "DoRA"),
    "whole layers": ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    "PiSSA": ({"init_lora_weights": "pissa_niter_4"}, "path_initial_model_for_weight_conversion"),
    "an expression": ({"alpha_pattern": {"(.|.)*[A-Z]": 8}}, "should match pattern"),
    "too many patterns": ({"alpha_pattern": {f"l{i}": 2 for i in range(4097)}}, "at most 4096 items"),
    "an alpha that is no number": ({"alpha_pattern": {"q_proj": float("nan")}}, "a finite number"),
    "an alpha that makes numbers too large": ({"lora_alpha": 1e300}, "scaled as float32"),
}
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no weights": (lambda folder: (folder / "adapter_model.safetensors").unlink(), "cannot be read"),
    "a file cut short": (lambda folder: cut(folder / "adapter_model.safetensors"), "is damaged"),
    "a file of noise": (
        lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"noise" * 99),
        "is damaged",
    ),
    "another layer": (lambda folder: rename(folder, "layers.9", False), "no such linear layer"),
    "a layer under two names": (
        lambda folder: rename(folder, "language_model.layers.0", True),
        "under two names",
    ),
    "another width": (
        lambda folder: change_weights(folder, **{QUERY: torch.zeros(4, 63)}),
        "63 → 64 features, and the model has 64 → 64",
    ),
    "infinite numbers": (
        lambda folder: change_weights(folder, **{QUERY: torch.full((4, 64), torch.inf)}),
        "not finite",
    ),
}


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-9])


def rename(folder: Path, layer: str, keeps: bool) -> None:
    """Give a part of the first layer another name; `keeps`: one more."""
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    query = {name: tensor for name, tensor in tensors.items() if "layers.0.self_attn.q_proj" in name}
    rest = {name: tensor for name, tensor in tensors.items() if keeps or name not in query}
    save_file(rest | {name.replace("layers.0", layer): one + 0 for name, one in query.items()}, file)


@pytest.fixture(scope="module")
def engine(llama: tuple[Any, Path]) -> Engine:
    return engine_of(llama[1])


@pytest.fixture
def folder(llama: tuple[Any, Path], tmp_path: Path) -> Path:
    return save_adapter(llama[0], tmp_path / "adapter", 1)


def refusal(engine: Engine, folder: Path) -> str:
    answer = engine.obey(SetAdapter("a", str(folder)))
    assert isinstance(answer, AdapterAnswer)
    return answer.cause


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_that_is_not_served_is_refused_by_name(engine: Engine, folder: Path, name: str) -> None:
    values, cause = CONFIGS[name]
    change_config(folder, **values)
    assert cause in refusal(engine, folder)


@pytest.mark.parametrize("name", DAMAGES)
def test_files_that_do_not_fit_are_refused(engine: Engine, folder: Path, name: str) -> None:
    damage, cause = DAMAGES[name]
    damage(folder)
    assert cause in refusal(engine, folder)


def test_a_rank_that_is_too_large_is_refused(engine: Engine, llama: tuple[Any, Path], tmp_path: Path) -> None:
    wide = save_adapter(llama[0], tmp_path, 1, r=65)
    assert "more than MAX_LORA_RANK (64)" in refusal(engine, wide)
