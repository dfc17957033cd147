"""A model's folder in a cloud's storage: by fsspec's store in memory, and by gcsfs from a server that answers
as Cloud Storage's JSON API.
"""

import datetime
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from common.settings.settings import SettingError
from deploy.tgi import cloud_storage
from tests.support.machine.http_thread import serving_in_thread
from tests.support.machine.ports import free_port

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


def test_a_folder_is_fetched_once_and_what_has_changed_again(
    store: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, data in MODEL.items():
        store.pipe_file(f"/b/x/{name}", data)
    store.pipe_file("/b/xy/config.json", b"other")
    folder = cloud_storage.fetch_folder("memory://b/x/")
    assert files(folder) == MODEL
    assert capsys.readouterr().err.count("fetching") == len(MODEL)
    store.pipe_file("/b/x/config.json", b"[]")
    store.store["/b/x/config.json"].modified += datetime.timedelta(seconds=2)
    assert cloud_storage.fetch_folder("memory://b/x/") == folder
    assert files(folder)["config.json"] == b"[]"
    assert capsys.readouterr().err.count("fetching") == 1


def test_a_file_that_is_cut_is_refused_and_not_kept(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store.pipe_file("/b/x/config.json", b"{}")
    with monkeypatch.context() as cut:
        cut.setattr(type(store), "get_file", lambda self, name, path: Path(path).write_bytes(b"{"))
        with pytest.raises(SettingError, match=r"config\.json did not arrive whole: 1 bytes"):
            cloud_storage.fetch_folder("memory://b/x")
    assert files(cloud_storage.fetch_folder("memory://b/x")) == {"config.json": b"{}"}


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


class Bucket:
    """The bucket `b`. A page of a list has two objects."""

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/storage/v1/b/b/o", self.list),
                Route("/storage/v1/b/b/o/{name:path}", self.describe),
                Route("/download/storage/v1/b/b/o/{name:path}", self.get),
            ]
        )

    def info(self, name: str) -> dict[str, str]:
        size = str(len(MODEL[name.removeprefix("x/")]))
        return {
            "kind": "storage#object",
            "name": name,
            "bucket": "b",
            "size": size,
            "updated": "2026-11-01T00:00:00.000Z",
        }

    async def list(self, request: Request) -> Response:
        names = [
            name for key in sorted(MODEL) if (name := f"x/{key}").startswith(request.query_params["prefix"])
        ]
        first = int(request.query_params.get("pageToken", 0))
        more = {"nextPageToken": str(first + 2)} if len(names) > first + 2 else {}
        return JSONResponse(
            {"kind": "storage#objects", "items": [self.info(name) for name in names[first : first + 2]]}
            | more
        )

    async def describe(self, request: Request) -> Response:
        return JSONResponse(self.info(request.path_params["name"]))

    async def get(self, request: Request) -> Response:
        return Response(MODEL[request.path_params["name"].removeprefix("x/")])


@pytest.mark.usefixtures("store")
def test_gcsfs_reads_a_folder_of_cloud_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gcsfs", reason="gcsfs is not installed")
    port = free_port()
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
    with serving_in_thread(Bucket().app(), port):
        assert files(cloud_storage.fetch_folder("gs://b/x")) == MODEL
