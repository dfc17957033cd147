"""Which model a worker serves next: what holds for all loads. By what two workers have the same model."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common import model_files
from common.settings.settings import Settings
from gpu_worker.swapping.swapper import MIN_TURN_S, TURN_SWAPS, PoolDemand, choose, model_digest


def test_a_large_swap_waits_for_a_client_that_asks_again_at_once() -> None:
    """A chat whose next question comes a second after the answer is not left for another model each time."""
    own = PoolDemand("own", swap_s=30.0)
    other = PoolDemand("other", num_waiting=1, swap_s=30.0)
    assert choose(own, [other], lasted_s=20.0, idle_s=1.0) is None
    assert choose(own, [other], lasted_s=20.0, idle_s=6.1) == "other"


def test_a_model_with_a_worker_gets_another_only_from_an_idle_one() -> None:
    served = PoolDemand("served", num_waiting=50, waited_s=30.0, num_workers=1, swap_s=2.0)
    working = PoolDemand("own", num_rows=1, swap_s=2.0)
    assert choose(working, [served], 1000.0, 0.0) is None
    assert choose(PoolDemand("own", swap_s=2.0), [served], 10.0, 10.0) == "served"


DEMANDS = st.builds(
    PoolDemand,
    pool=st.just("x"),
    num_waiting=st.integers(0, 1000),
    waited_s=st.floats(0, 1000),
    num_rows=st.integers(0, 256),
    num_workers=st.integers(0, 3),
    swap_s=st.floats(0, 100),
    can_wake=st.booleans(),
)


@given(DEMANDS, st.lists(DEMANDS, min_size=1, max_size=4))
def test_no_model_starves_and_swaps_take_a_fifth_of_the_time(
    own: PoolDemand, others: list[PoolDemand]
) -> None:
    """However busy a worker is: a turn is several times as long as the swaps for it, and has an end."""
    own = replace(own, num_waiting=own.num_waiting + 1)
    waiting = [replace(one, num_waiting=1 + one.num_waiting, num_workers=0, can_wake=True) for one in others]
    longest_s = max(MIN_TURN_S, TURN_SWAPS * (own.swap_s + max(one.swap_s for one in waiting)))
    assert choose(own, waiting, longest_s, 0.0)
    shortest_s = TURN_SWAPS * (own.swap_s + min(one.swap_s for one in waiting))
    assert choose(own, waiting, max(MIN_TURN_S, shortest_s) - 0.01, 0.0) is None


@given(DEMANDS, st.lists(DEMANDS, max_size=4), st.floats(0, 1000), st.floats(0, 1000))
def test_a_swap_is_only_ever_to_a_model_that_waits_and_can_be_woken(
    own: PoolDemand, others: list[PoolDemand], lasted_s: float, idle_s: float
) -> None:
    found = choose(own, others, lasted_s, idle_s)
    assert found is None or any(other.num_waiting and other.can_wake for other in others)


def test_a_digest_is_of_the_files_that_decide_what_a_model_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not of where they are, nor of settings. Conversions of a GGUF file differ, and have its digest."""

    def digest(folder: str, **files: str) -> str:
        path = tmp_path / folder
        path.mkdir(exist_ok=True)
        written = {"config.json": "{}", "tokenizer.json": "{}", "model.safetensors": "weights"} | {
            name.replace("__", "."): text for name, text in files.items()
        }
        for name, text in written.items():
            (path / name).write_text(text)
        return model_digest(Settings(), path)

    own = digest("own")
    assert own == digest("same", README__md="moved")
    changed = ("config__json", "tokenizer__json", "model__safetensors", "generation_config__json")
    assert len({own, *(digest(name, **{name: "[0]"}) for name in changed)}) == 1 + len(changed)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("a", "other-name", "b"):
        (tmp_path / f"{name}.gguf").write_text("others" if name == "b" else "weights")
    exact, rounded, same, other = (
        model_digest(Settings(), model_files.conversion_path(tmp_path / f"{name}.gguf", dtype))
        for name, dtype in (("a", "float32"), ("a", "auto"), ("other-name", "auto"), ("b", "auto"))
    )
    assert exact == rounded == same != other
    assert not model_digest(Settings(load_format="dummy"), tmp_path / "own")
