"""A worker says what its tokens depend on, the digest of its weights included."""

import hashlib
import json
from pathlib import Path
from typing import Any

from common.settings.settings import Settings
from gpu_worker.agent.build import WeightDigest, WorkerBuild
from gpu_worker.protocol import Ready
from tests.support.waiting import wait_until_sync

READY = Ready("m", "float32", "cpu", 16, 100, 64, 2048, b"", inexact_because="it is a test")


def built(settings: Settings, directory: Path) -> dict[str, Any]:
    """What a worker says of itself once the digest of its weights is known."""
    build = WorkerBuild(settings, READY, directory, WeightDigest(settings, directory))
    wait_until_sync(lambda: json.loads(build.text)["weights_sha256"])
    assert b"\n" not in build.text
    found: dict[str, Any] = json.loads(build.text)
    return found


def test_a_changed_weight_file_and_setting_change_the_build(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"weights")
    before = built(Settings(), tmp_path)
    weights.write_bytes(b"others")
    after = built(Settings(kv_cache_dtype="fp8_e5m2"), tmp_path)
    assert after["weights_sha256"] == hashlib.sha256(b"others").hexdigest()
    assert before["inexact_because"] == "it is a test"
    assert {name for name in before if before[name] != after[name]} == {"weights_sha256", "settings"}


def test_random_weights_have_no_digest(tmp_path: Path) -> None:
    settings = Settings(load_format="dummy")
    build = WorkerBuild(settings, READY, tmp_path, WeightDigest(settings, tmp_path))
    assert json.loads(build.text)["weights_sha256"] is None
