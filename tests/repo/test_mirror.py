"""Tests mirror modules: tests/unit/common/broker/test_client.py is about common/broker/client.py."""

from tests.support.source_tree import ROOT

UNIT = ROOT / "tests" / "unit"
BEHAVIOURS = {
    "common/broker/test_tls.py",
    "common/scripts/test_batcher_scripts.py",  # Lua
    "common/scripts/test_job_scripts.py",  # Lua
    "common/scripts/test_places.py",  # Lua
    "common/scripts/test_reader_scripts.py",  # Lua
    "common/scripts/test_scripts.py",  # Lua
    "common/scripts/test_terminal_scripts.py",  # Lua
    "gpu_worker/agent/test_flush_step.py",
    "gpu_worker/agent/test_offer.py",
    "gpu_worker/agent/test_speculation.py",
    "gpu_worker/engine/batch/test_max_rows.py",
    "gpu_worker/engine/batch/test_proposals.py",
    "gpu_worker/engine/cuda/test_kernels.py",
    "gpu_worker/engine/model/test_families.py",
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
"""Files that are about what several modules do together."""


def test_unit_tests_have_the_name_of_their_module() -> None:
    found = {path.relative_to(UNIT).as_posix() for path in UNIT.rglob("test_*.py")}
    homeless = {name for name in found if not (ROOT / name.replace("test_", "", 1)).is_file()}
    assert homeless == set(BEHAVIOURS)


def test_every_test_file_lies_in_a_room() -> None:
    files = (ROOT / "tests").rglob("test_*.py")
    rooms = {path.relative_to(ROOT / "tests").parts[0] for path in files}
    assert rooms == {"unit", "integration", "fleet", "clients", "gpu", "repo"}
