"""Models with states on two ranks, and in two stages: the ids of transformers' `generate`."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from common.settings.settings import SettingError
from gpu_worker.engine.parallel.communicator import Communicator
from tests.support.engine import multi_rank_engine, tiny_models
from tests.support.engine.multi_rank_engine import SETTINGS, Led, check_ids, player
from tests.support.states.hybrid_models import HYBRIDS

pytestmark = pytest.mark.slow

PLANNED = (
    "LFM2-MoE",
    "Granite4",
    "Jamba",
    "Nemotron-H",
    "Qwen3.5",
    "Qwen3.5-MoE",
    "OLMo-Hybrid",
    "Kimi-Linear",
)


@pytest.fixture(scope="module", params=[1, 2], ids=["ranks", "stages"])
def two(request: pytest.FixtureRequest) -> Iterator[Communicator]:
    with multi_rank_engine.running(2, num_stages=request.param) as ranks:
        yield ranks


@pytest.mark.parametrize(
    "family", ["Qwen3-Next", *(pytest.param(name, marks=pytest.mark.slow) for name in PLANNED)]
)
def test_ids_of_two_ranks_equal_generate(two: Communicator, family: str, tmp_path: Path) -> None:
    """Ranks share out experts, attention, and projections of mixers; each has all states. A stage has those
    of its layers.
    """
    check_ids(two, HYBRIDS[family], tmp_path)


@pytest.mark.parametrize(
    "family", ["Mamba2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("LFM2", "Mamba"))]
)
def test_models_without_a_plan_run_in_stages_only(two: Communicator, family: str, tmp_path: Path) -> None:
    if two.num_stages > 1:
        check_ids(two, HYBRIDS[family], tmp_path)
        return
    tiny_models.save(tmp_path, *HYBRIDS[family])
    with pytest.raises(SettingError, match="no plan for"):
        Led(two, model_id=str(tmp_path), **SETTINGS)


def test_models_whose_code_looks_into_other_stages_are_refused(two: Communicator, tmp_path: Path) -> None:
    tiny_models.save(tmp_path, *HYBRIDS["FalconH1"])
    cause = "layers that other stages have" if two.num_stages > 1 else "no plan for"
    with pytest.raises(SettingError, match=cause):
        Led(two, model_id=str(tmp_path), **SETTINGS)


def test_two_ranks_keep_and_use_snapshots_alike(two: Communicator, tmp_path: Path) -> None:
    """A second turn starts where the first ended, on all ranks."""
    model = tiny_models.save(tmp_path, *HYBRIDS["Qwen3-Next"])
    with Led(two, model_id=str(tmp_path), **SETTINGS | {"block_size": 16}) as led:
        played, prompt = player(led), list(range(5, 45))
        played.kept = {*played.free}
        answer = played.run([played.start(1, prompt, 20, ignore_eos=True)])[1]
        later, cached, slots = [*prompt, *answer, 7, 8], played.tables[1][:3], led.rows.state_slots
        assert slots and cached[-1] in slots.snapshots.slots
        found = played.run([played.start_behind(cached, 2, later, 8, ignore_eos=True)])[2]
        assert found == tiny_models.generate(model, later, 8)
        assert sum(step.prefill_tokens for step in played.steps) == len(prompt) + len(later) - 48
