"""A worker says what its tokens depend on, the digest of its weights included."""

import hashlib
import json
from pathlib import Path

from common.settings.settings import Settings
from gpu_worker.agent.build import WorkerBuild
from gpu_worker.protocol import Ready
from tests.support.waiting import wait_until_sync

READY = Ready("m", "float32", "cpu", 16, 100, 64, 2048, b"", inexact_because="it is a test")


def test_a_changed_weight_file_and_setting_change_the_build(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    builds = []
    for content, dtype in ((b"weights", "auto"), (b"others!!", "fp8_e5m2")):
        (tmp_path / "model.safetensors").write_bytes(content)
        build = WorkerBuild(Settings(kv_cache_dtype=dtype), READY, tmp_path)
        wait_until_sync(lambda build=build: json.loads(build.text)["weights_sha256"])
        builds.append(json.loads(build.text))
        assert b"\n" not in build.text
        assert builds[-1]["weights_sha256"] == hashlib.sha256(content).hexdigest()
    assert builds[0]["inexact_because"] == "it is a test"
    assert {name for name in builds[0] if builds[0][name] != builds[1][name]} == {
        "weights_sha256",
        "settings",
    }


def test_random_weights_have_no_digest(tmp_path: Path) -> None:
    build = WorkerBuild(Settings(load_format="dummy"), READY, tmp_path)
    assert json.loads(build.text)["weights_sha256"] is None
