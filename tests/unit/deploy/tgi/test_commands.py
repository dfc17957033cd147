"""What TGI's commands become."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from common.settings.settings import SettingError
from deploy.tgi import commands

CLOUD = ("MODEL_ID", "HF_MODEL_ID", "AIP_STORAGE_URI", "SAGEMAKER_BIND_TO_PORT", "AIP_HTTP_PORT")


@pytest.fixture(autouse=True)
def places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[Path, ...]:
    """The folders of clouds, on a machine of none."""
    for name in CLOUD:
        monkeypatch.delenv(name, raising=False)
    found = (tmp_path / "ml", tmp_path / "repository")
    monkeypatch.setattr(commands, "PLACES", found)
    return found


def put_model(folder: Path) -> None:
    folder.mkdir()
    (folder / "config.json").write_text("{}")


@pytest.mark.parametrize(
    ("words", "becomes"),
    [
        ([], ["serve"]),
        (["--model-id", "X", "--num-shard", "2"], ["serve", "--model-id", "X", "--num-shard", "2"]),
        (["--version"], ["--version"]),
        (["serve"], ["serve", "--port", "8080"]),
    ],
)
def test_the_launcher_serves(words: Sequence[str], becomes: Sequence[str]) -> None:
    assert commands.launcher_words(words) == becomes


@pytest.mark.parametrize(
    ("name", "words"),
    [("SAGEMAKER_BIND_TO_PORT", ["serve"]), ("AIP_HTTP_PORT", []), ("AIP_HTTP_PORT", ["-e"])],
)
def test_a_cloud_s_port_goes_before_the_image_s(
    monkeypatch: pytest.MonkeyPatch, name: str, words: list[str]
) -> None:
    monkeypatch.setenv("PORT", "80")
    monkeypatch.setenv(name, "8081")
    given = [] if words == ["serve"] else words
    assert commands.launcher_words(words) == ["serve", *given, "--port", "8081"]
    assert "8081" not in commands.launcher_words(["-p", "1"])


def test_the_router_has_no_worker() -> None:
    assert commands.router_words(["--port", "1"]) == ["serve", "--num-workers", "0", "--port", "1"]


@pytest.mark.parametrize(
    ("words", "becomes"),
    [
        (["serve", "X", "--sharded"], ["supervise", "worker", "--model-id", "X", "--sharded"]),
        (["download-weights", "X"], ["download-weights", "X"]),
        (["quantize", "X", "out"], ["quantize", "X", "out"]),
        (["--help"], ["supervise", "--help"]),
    ],
)
def test_the_server_is_a_worker(words: Sequence[str], becomes: Sequence[str]) -> None:
    assert commands.server_words(words) == becomes


@pytest.mark.parametrize("words", [[], ["serve"], ["serve", "--sharded"], ["train", "X"]])
def test_other_words_of_the_server_are_refused(words: Sequence[str]) -> None:
    with pytest.raises(SettingError, match="is not one of serve MODEL_ID, download-weights"):
        commands.server_words(words)


def test_a_model_that_a_cloud_has_put_there_is_served(
    places: tuple[Path, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    sagemaker, endpoints = places
    endpoints.mkdir()
    assert commands.launcher_words([]) == ["serve"], "a folder without a model is no model"
    (endpoints / "config.json").write_text("{}")
    assert commands.launcher_words([]) == ["serve", "--model-id", str(endpoints)]
    put_model(sagemaker)
    assert commands.launcher_words(["serve"])[-1] == str(sagemaker)
    for named in (["--model-id", "X"], ["--model-id=X"], ["X", "--port", "1"]):
        assert commands.launcher_words(named) == ["serve", *named]
    monkeypatch.setenv("HF_MODEL_ID", "X")
    assert commands.launcher_words([]) == ["serve"]


def test_a_folder_that_vertex_names_goes_before_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODEL_ID", "X")
    monkeypatch.setenv("AIP_STORAGE_URI", "ftp://bucket/model")
    with pytest.raises(SettingError, match=r"AIP_STORAGE_URI: .* is no folder of Cloud Storage"):
        commands.launcher_words([])
    assert commands.launcher_words(["--model-id", "Y"]) == ["serve", "--model-id", "Y"]


def test_the_benchmark_is_refused_by_name() -> None:
    with pytest.raises(SettingError, match=r"text-generation-benchmark is not served: .* guidellm or aiperf"):
        commands.benchmark_words(["--tokenizer-name", "org/model"])
