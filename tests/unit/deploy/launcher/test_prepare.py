from pathlib import Path
from typing import Any

import pytest

from common.process import machine
from common.settings.settings import SettingError, Settings
from deploy.launcher import prepare
from tests.support.engine import tiny_tokenizers

GIB = 2**30


def test_caches_of_all_workers_must_fit_in_memory_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "available_bytes", lambda: 3 * GIB)
    monkeypatch.setattr(prepare, "NVIDIA", tmp_path / "nvidiactl")
    prepare.check_memory(Settings(num_workers=3))
    for device in ("cpu", "auto"):
        with pytest.raises(SettingError) as refusal:
            prepare.check_memory(Settings(num_workers=4, device=device))
        words = "1024 MiB for each of 4 (NUM_WORKERS), but only 3072 MiB of memory are available"
        assert str(refusal.value) == f"KV_CACHE_BYTES: {words}"


def test_caches_on_a_gpu_are_not_checked_by_the_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "available_bytes", lambda: 0)
    monkeypatch.setattr(prepare, "NVIDIA", tmp_path)
    for device in ("cuda", "auto"):
        prepare.check_memory(Settings(device=device))
    with pytest.raises(SettingError):
        prepare.check_memory(Settings(device="cpu"))


def test_serve_under_torchrun_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    prepare.check_fleet(Settings())
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(SettingError, match="WORLD_SIZE: is set by torchrun"):
        prepare.check_fleet(Settings())


def test_a_fleet_on_several_machines_has_one_worker_and_machine_0() -> None:
    prepare.check_fleet(Settings(nnodes=2, num_shard=2))
    with pytest.raises(
        SettingError, match="NODE_RANK: 1: a fleet runs on machine 0; start `tokenfleet worker` here"
    ):
        prepare.check_fleet(Settings(nnodes=2, num_shard=2, node_rank=1))
    with pytest.raises(SettingError, match="NUM_WORKERS: 2, but only one worker may run on several machines"):
        prepare.check_fleet(Settings(nnodes=2, num_shard=2, num_workers=2))


def test_the_tokenizer_is_found_and_must_fit_the_model(tmp_path: Path) -> None:
    model, tokenizer = tmp_path / "model", tmp_path / "tokenizer"
    for folder in (model, tokenizer):
        folder.mkdir()
    tiny_tokenizers.byte_level(tokenizer)
    settings = Settings(model_id=str(model), tokenizer_name=str(tokenizer / "tokenizer.json"))
    (model / "config.json").write_text('{"vocab_size": 605}')
    found = prepare.with_model(settings)
    assert (found.model_id, found.tokenizer_name) == (str(model), str(tokenizer))
    (model / "config.json").write_text('{"text_config": {"vocab_size": 604}}')
    with pytest.raises(SettingError) as refusal:
        prepare.with_model(settings)
    words = "its tokenizer has ids up to 604, and the model's embedding only 604 ids"
    assert str(refusal.value) == f"TOKENIZER_NAME: is not served: {words}"
    (model / "config.json").write_text("{}")
    with pytest.raises(SettingError, match=r"^TOKENIZER_NAME: .*config.json has no vocab_size"):
        prepare.with_model(settings)
    (tokenizer / "tokenizer.json").write_text("{")
    with pytest.raises(SettingError, match=r"^TOKENIZER_NAME: .*tokenizer.json is no tokenizer, or damaged"):
        prepare.with_model(settings)


def test_limits_beyond_the_context_are_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    tiny_tokenizers.byte_level(tmp_path)
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 64}')
    known: dict[str, Any] = {"model_id": str(tmp_path)}
    prepare.with_model(Settings(**known, max_total_tokens=64, max_input_tokens=63))
    prepare.with_model(Settings(**known, max_total_tokens=128, rope_factor=2))
    with pytest.raises(SettingError) as refusal:
        prepare.with_model(Settings(**known, max_total_tokens=65))
    assert str(refusal.value) == "MAX_TOTAL_TOKENS: 65 is more than the 64 tokens of the model's context"
    with pytest.raises(SettingError, match="MAX_INPUT_TOKENS: 64 is more than the 63 tokens of the model's"):
        prepare.with_model(Settings(**known, max_input_tokens=64))


@pytest.mark.parametrize(
    ("settings", "warns"),
    [
        ({}, True),
        ({"hostname": "::"}, True),
        ({"hostname": "my-machine"}, True),
        ({"api_key": "secret"}, False),
        ({"api_keys_file": "keys.yaml"}, False),
        ({"hostname": "127.0.0.1"}, False),
        ({"hostname": "localhost"}, False),
    ],
)
def test_a_fleet_for_everybody_without_a_key_is_a_warning(
    settings: dict[str, Any], warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    prepare.say_access(Settings(**settings))
    warnings = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert bool(warnings) == warns
    assert not warns or "set API_KEY, or HOSTNAME=127.0.0.1" in warnings[0]
