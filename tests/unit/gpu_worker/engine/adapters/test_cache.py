"""The cache of adapters: slots of the device, memory of the host, and files; and rows that want more adapters
than there are slots.
"""

from pathlib import Path
from typing import Any

import pytest

from common.settings.settings import Settings
from gpu_worker.engine.engine import Engine
from gpu_worker.protocol import (
    AdapterLoaded,
    AdapterRefused,
    AdapterUnloaded,
    Grant,
    LoadAdapter,
    UnloadAdapter,
)
from tests.support.adapters.playing import COUNT, load_adapters, play
from tests.support.adapters.tiny_adapters import change_config, expected_ids, save_adapter
from tests.support.engine import tiny_models
from tests.support.engine.batch_player import Player
from tests.support.engine.start_rows import start_row

NAMES = ["a", "b", "c", "d", "e"]
PROMPT = list(range(3, 23))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("model")
    return tiny_models.save(folder, *tiny_models.FAMILIES["Llama-tied"]), folder


@pytest.fixture
def folders(model: tuple[Any, Path], tmp_path: Path) -> dict[str, Path]:
    return {name: save_adapter(model[0], tmp_path / name, seed) for seed, name in enumerate(NAMES)}


def engine_with(folder: Path, **settings: Any) -> Engine:
    common: dict[str, Any] = {
        "dtype": "float32",
        "kv_cache_bytes": 2**22,
        "max_batch_prefill_tokens": 64,
        "block_size": 8,
        "threads": 1,
    }
    return Engine(Settings(model_id=str(folder), **common, **settings))


def ids_of(model: Any, folder: Path | None) -> list[int]:
    return expected_ids(model, folder, [PROMPT], COUNT)[0]


@pytest.mark.slow
def test_rows_of_more_adapters_than_slots_all_end_with_their_own_ids(
    model: tuple[Any, Path], folders: dict[str, Path]
) -> None:
    engine = engine_with(model[1], max_loras=2, max_cpu_loras=3)
    load_adapters(engine, folders)
    rows = {number: (PROMPT, name) for number, name in enumerate([*NAMES, "", *NAMES])}
    expected = {name: ids_of(model[0], folders.get(name)) for name in ["", *NAMES]}
    assert play(engine, rows) == {number: expected[name] for number, (_, name) in rows.items()}
    assert engine.adapters and len(engine.adapters.host) == 3, "two of the five were read again"
    assert sorted(adapter.slot for adapter in engine.adapters.used) == [0, 1]


def test_an_adapter_that_is_unloaded_while_rows_have_it_serves_them_and_no_others(
    model: tuple[Any, Path], folders: dict[str, Path]
) -> None:
    engine = engine_with(model[1])
    load_adapters(engine, {"a": folders["a"]})
    played = Player(engine, list(range(1, 50)), until=100)
    start = played.start(1, PROMPT, COUNT, ignore_eos=True, adapter="a")
    engine.apply(Grant(100, 64, [start]))
    engine.apply(Grant(100, 64, blocks=played.grow(COUNT, 1)))
    first = engine.step()
    assert first and first.num_samples == 1
    assert engine.obey(UnloadAdapter("a")) == AdapterUnloaded("a")
    answer = engine.obey(LoadAdapter("a", str(folders["b"])))
    assert isinstance(answer, AdapterLoaded)
    later = played.start(2, PROMPT, COUNT, ignore_eos=True, adapter="a")
    engine.apply(Grant(100, 64, [later]))
    engine.apply(Grant(100, 64, blocks=played.grow(COUNT, 2)))
    for step in [first, *iter(engine.step, None)]:
        played.collect(step)
    assert played.ids[1] == ids_of(model[0], folders["a"])
    assert played.ids[2] == ids_of(model[0], folders["b"])
    engine.obey(UnloadAdapter("other"))
    assert engine.adapters and len(engine.adapters.sources) == 1, "nothing is left of the first"


def test_a_row_whose_adapter_is_not_loaded_ends(model: tuple[Any, Path]) -> None:
    engine = engine_with(model[1])
    engine.apply(Grant(9, 64, [start_row(1, PROMPT, COUNT, blocks=[1, 2, 3, 4], adapter="gone")]))
    step = engine.step()
    assert step and [*step.ended, *step.released] == [(1, "adapter", 0), (1, 0)]


def test_rows_of_an_adapter_whose_files_have_changed_end_and_others_go_on(
    model: tuple[Any, Path], folders: dict[str, Path]
) -> None:
    engine = engine_with(model[1], max_loras=1, max_cpu_loras=1)
    load_adapters(engine, {"a": folders["a"], "b": folders["b"]})
    save_adapter(model[0], folders["a"], 9)
    played = Player(engine, list(range(1, 50)), until=engine.rows.step)
    starts = [
        played.start(number, PROMPT, COUNT, ignore_eos=True, adapter=name)
        for number, name in enumerate(["a", "b", ""])
    ]
    ids = played.run(starts)
    assert played.ended[0] == ("adapter", 0) and not ids[0]
    assert ids[1] == ids_of(model[0], folders["b"]) and ids[2] == ids_of(model[0], None)


def test_an_engine_that_takes_no_adapters_says_so(model: tuple[Any, Path]) -> None:
    engine = engine_with(model[1], enable_lora=False)
    assert engine.ready.max_loras == 0
    answer = engine.obey(LoadAdapter("a", "/nowhere"))
    assert answer == AdapterRefused("a", "this worker takes no adapters (ENABLE_LORA)")
    assert engine.obey(UnloadAdapter("a")) == AdapterUnloaded("a")


def test_what_is_loaded_stays_where_its_successor_is_refused(
    model: tuple[Any, Path], folders: dict[str, Path]
) -> None:
    engine = engine_with(model[1], max_loras=3, max_lora_rank=16)
    assert (engine.ready.max_loras, engine.ready.max_lora_rank, engine.ready.max_cpu_loras) == (3, 16, 12)
    answer = engine.obey(LoadAdapter("a", str(folders["a"])))
    assert isinstance(answer, AdapterLoaded) and answer.rank == 4 and answer.num_bytes > 0
    change_config(folders["b"], use_dora=True)
    assert isinstance(engine.obey(LoadAdapter("a", str(folders["b"]))), AdapterRefused)
    assert play(engine, {1: (PROMPT, "a")})[1] == ids_of(model[0], folders["a"])
