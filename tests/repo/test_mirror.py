"""Tests mirror modules: tests/unit/common/broker/test_client.py is about common/broker/client.py, and so is
test_client_sentinel.py, about a part of it.
"""

from pathlib import Path

from tests.support.source_tree import ROOT

UNIT = ROOT / "tests" / "unit"
BEHAVIOURS = {
    "common/broker/test_tls.py",
    "common/scripts/test_batcher_scripts.py",  # Lua
    "common/scripts/test_job_records.py",  # Lua
    "common/scripts/test_job_scripts.py",  # Lua
    "common/scripts/test_logits.py",  # Lua
    "common/scripts/test_places.py",  # Lua
    "common/scripts/test_reader_scripts.py",  # Lua
    "common/scripts/test_scripts.py",  # Lua
    "common/scripts/test_terminal_scripts.py",  # Lua
    "common/scripts/test_usage.py",  # Lua
    "gpu_worker/agent/rows/test_offer.py",
    "gpu_worker/agent/rows/test_speculation.py",
    "gpu_worker/engine/adapters/test_adapter_features.py",
    "gpu_worker/engine/adapters/test_adapter_ids.py",
    "gpu_worker/engine/adapters/test_adapters_parallel.py",
    "gpu_worker/engine/adapters/test_refusals.py",
    "gpu_worker/engine/batch/test_max_rows.py",
    "gpu_worker/engine/batch/test_proposals.py",
    "gpu_worker/engine/cuda/test_kernels.py",
    "gpu_worker/engine/parallel/test_drafting.py",
    "gpu_worker/engine/parallel/test_speculation.py",
    "gpu_worker/engine/parallel/test_tensor_parallel.py",
    "gpu_worker/engine/quantization/test_ranks.py",
    "gpu_worker/engine/sampling/test_seeds.py",
    "gpu_worker/engine/test_deterministic.py",
    "gpu_worker/engine/test_exact_ids.py",
    "gpu_worker/engine/test_forced_calls.py",
    "gpu_worker/engine/test_jump_forward.py",
    "gpu_worker/engine/test_speculation.py",
    "gpu_worker/engine/test_structured_output.py",
}
"""Test files about what several modules do together."""


def test_unit_tests_have_the_name_of_their_module() -> None:
    found = {path.relative_to(UNIT).as_posix() for path in UNIT.rglob("test_*.py")}
    assert {name for name in found if not has_module(name)} == set(BEHAVIOURS)


def has_module(name: str) -> bool:
    """Whether a module has the name of its test, or the beginning of that name up to a `_`."""
    folder, test = (ROOT / name).parent, Path(name).stem.removeprefix("test_")
    return any(test == module.stem or test.startswith(f"{module.stem}_") for module in folder.glob("*.py"))


def test_every_test_file_lies_in_a_room() -> None:
    files = (ROOT / "tests").rglob("test_*.py")
    rooms = {path.relative_to(ROOT / "tests").parts[0] for path in files}
    assert rooms == {"unit", "integration", "fleet", "clients", "gpu", "repo"}
