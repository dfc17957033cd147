"""What TGI's commands become, and a model's folder in a cloud's storage."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import fsspec
import pytest

from common.settings.settings import SettingError, Settings
from deploy.tgi import cloud_storage, commands
from tests.support.machine import fake_nvml

# --- commands -----------------------------------------------------------------------------------------------

CLOUD = ("AIP_STORAGE_URI", "SAGEMAKER_BIND_TO_PORT", "AIP_HTTP_PORT", "CUDA_VISIBLE_DEVICES")
NAMING = ("MODEL_ID", "HF_MODEL_ID", "TOKENIZER_NAME", "NUM_SHARD", "SM_NUM_GPUS", "DEVICE")


@pytest.fixture(autouse=True)
def places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[Path, ...]:
    """The folders of clouds, on a machine of none, without GPUs."""
    fake_nvml.install(monkeypatch)
    for name in CLOUD + NAMING:
        monkeypatch.delenv(name, raising=False)
    found = (tmp_path / "ml", tmp_path / "repository")
    monkeypatch.setattr(commands, "PLACES", found)
    return found


@pytest.mark.parametrize(
    ("words", "becomes"),
    [
        ([], ["serve"]),
        (["--model-id", "X", "--num-shard", "2"], ["serve", "--model-id", "X", "--num-shard", "2"]),
        (["serve"], ["serve", "--port", "8080"]),
    ],
)
def test_the_launcher_serves(words: Sequence[str], becomes: Sequence[str]) -> None:
    assert commands.launcher_words(words) == becomes


def test_the_launcher_shows_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        commands.launcher_words(["--version"])
    assert capsys.readouterr().out.startswith("tokenfleet ")


@pytest.mark.parametrize(
    ("visible", "words", "variables", "is_sharded"),
    [
        ("", [], {}, False),
        ("0", [], {}, False),
        ("1,0", ["--port", "80"], {}, True),
        (None, ["serve"], {}, True),
        (None, ["-tp", "1"], {}, False),
        (None, ["--sharded", "false"], {}, False),
        (None, ["--num-workers=2"], {}, False),
        (None, [], {"SM_NUM_GPUS": "1"}, False),
        (None, [], {"DEVICE": "cpu"}, False),
    ],
)
def test_the_launcher_s_worker_uses_all_gpus(
    monkeypatch: pytest.MonkeyPatch,
    visible: str | None,
    words: list[str],
    variables: dict[str, str],
    is_sharded: bool,
) -> None:
    """Those that CUDA_VISIBLE_DEVICES allows, unless another setting says how many."""
    fake_nvml.install(monkeypatch, "GPU-a", "GPU-b")
    for name, value in (variables | ({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})).items():
        monkeypatch.setenv(name, value)
    assert (commands.launcher_words(words)[-1] == "--sharded") == is_sharded


def test_the_router_s_tokenizer_names_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing else does."""

    def names(*words: str) -> tuple[str, str | None]:
        found = Settings.read(commands.router_words(words)[1:], {})
        return found.model_id, found.tokenizer_name

    assert names("--tokenizer-name", "X", "--port", "80") == names("--tokenizer-name=X") == ("X", None)
    assert names("--tokenizer-name", "X", "--model-id", "Y") == ("Y", "X")
    monkeypatch.setenv("TOKENIZER_NAME", "X")
    assert names() == ("X", None)
    monkeypatch.setenv("MODEL_ID", "Y")
    assert commands.router_words([]) == ["serve", "--num-workers", "0"]


@pytest.mark.parametrize(
    ("name", "words"),
    [("SAGEMAKER_BIND_TO_PORT", ["serve"]), ("AIP_HTTP_PORT", []), ("AIP_HTTP_PORT", ["-e"])],
)
def test_a_cloud_s_port_goes_before_the_image_s(
    monkeypatch: pytest.MonkeyPatch, name: str, words: list[str]
) -> None:
    monkeypatch.setenv("PORT", "80")
    monkeypatch.setenv(name, "8081")
    assert commands.launcher_words(words) == ["serve", *(set(words) - {"serve"}), "--port", "8081"]
    assert "8081" not in commands.launcher_words(["-p", "1"])


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
    sagemaker.mkdir()
    (sagemaker / "config.json").write_text("{}")
    assert commands.launcher_words(["serve"])[-1] == str(sagemaker)
    for named in (["--model-id", "X"], ["--model-id=X"], ["X", "--port", "1"]):
        assert commands.launcher_words(named) == ["serve", *named]
    monkeypatch.setenv("HF_MODEL_ID", "X")
    assert commands.launcher_words([]) == ["serve"]


def test_the_benchmark_is_refused_by_name() -> None:
    with pytest.raises(SettingError, match=r"text-generation-benchmark is not served: .* guidellm or aiperf"):
        commands.benchmark_words(["--tokenizer-name", "org/model"])


# --- cloud storage ------------------------------------------------------------------------------------------

MODEL = {"config.json": b"{}", "model.safetensors": b"w" * 3000, "original/params.json": b"[]"}


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cloud_storage, "SCHEMES", ("gs://", "memory://"))
    store = fsspec.filesystem("memory")
    store.store.clear()
    yield store
    store.store.clear()


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_folder_is_fetched_once_and_as_a_whole(
    store: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, data in MODEL.items():
        store.pipe_file(f"/b/x/{name}", data)
    store.pipe_file("/b/xy/config.json", b"other")
    with monkeypatch.context() as cut:
        cut.setattr(type(store), "get_file", lambda self, name, path: Path(path).write_bytes(b"{") / 0)
        with pytest.raises(SettingError, match=r"AIP_STORAGE_URI: memory://b/x/ cannot be read"):
            cloud_storage.fetch_folder("memory://b/x/")
    folder = cloud_storage.fetch_folder("memory://b/x/")
    assert files(folder) == MODEL
    assert cloud_storage.fetch_folder("memory://b/x/") == folder
    assert capsys.readouterr().err.count("fetching 3 files") == 2
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


@pytest.mark.parametrize(
    ("uri", "cause"),
    [
        ("ftp://b/x", "is no folder of Cloud Storage"),
        ("memory://", "is no folder of Cloud Storage"),
        ("memory://b/empty", "has no files"),
        ("memory://b/bad", "is no name of a file in a folder"),
    ],
)
def test_what_cannot_be_fetched_is_refused_by_name(store: Any, uri: str, cause: str) -> None:
    store.pipe_file("/b/bad/../x", b"")
    with pytest.raises(SettingError, match=f"^AIP_STORAGE_URI: .*{cause}"):
        cloud_storage.fetch_folder(uri)


@pytest.mark.usefixtures("store")
def test_a_store_that_is_not_installed_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["fsspec.registry"], "registry", {})  # stores that were found before
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(
        SettingError, match=r"AIP_STORAGE_URI: gs:// is not installed here: .*tokenfleet\[cloud"
    ):
        cloud_storage.fetch_folder("gs://b/x")
