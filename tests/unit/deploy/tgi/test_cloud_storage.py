"""A model's folder in Cloud Storage, from a server that answers as its JSON API."""

import base64
import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from common.settings.settings import SettingError
from deploy.tgi import cloud_storage
from tests.support.machine.http_thread import serving_in_thread
from tests.support.machine.ports import free_port

TOKEN = "t0"


class Storage:
    """One bucket `b`, and the metadata server of its machine. A page of a list has two objects."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.sent: list[str] = []
        self.damage = b""

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/storage/v1/b/b/o", self.list),
                Route("/storage/v1/b/b/o/{name:path}", self.get),
                Route(cloud_storage.TOKEN_PATH, self.give_token),
            ]
        )

    async def give_token(self, request: Request) -> Response:
        assert request.headers["metadata-flavor"] == "Google"
        return JSONResponse({"access_token": TOKEN})

    async def list(self, request: Request) -> Response:
        if request.headers.get("authorization") != f"Bearer {TOKEN}":
            return Response(status_code=403)
        names = [name for name in sorted(self.objects) if name.startswith(request.query_params["prefix"])]
        first = int(request.query_params.get("pageToken", 0))
        items = [
            {
                "name": name,
                "size": str(len(self.objects[name])),
                "md5Hash": base64.b64encode(hashlib.md5(self.objects[name]).digest()).decode(),
            }
            for name in names[first : first + 2]
        ]
        more = {"nextPageToken": str(first + 2)} if len(names) > first + 2 else {}
        return JSONResponse({"items": items} | more if items else {})

    async def get(self, request: Request) -> Response:
        name = request.path_params["name"]
        assert request.query_params["alt"] == "media"
        self.sent.append(name)
        return Response(self.objects[name] + self.damage)


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Storage]:
    port = free_port()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("GCE_METADATA_HOST", f"127.0.0.1:{port}")
    monkeypatch.delenv("STORAGE_EMULATOR_HOST", raising=False)
    monkeypatch.setattr(cloud_storage, "API_URL", f"http://127.0.0.1:{port}")
    storage = Storage()
    with serving_in_thread(storage.app(), port):
        yield storage


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_folder_is_fetched_once_and_what_has_changed_again(storage: Storage) -> None:
    model = {"config.json": b"{}", "model.safetensors": b"w" * 3000, "original/params.json": b"[]"}
    storage.objects = {f"models/x/{name}": data for name, data in model.items()}
    storage.objects |= {"models/x/": b"", "models/xy/config.json": b"other"}
    folder = cloud_storage.fetch_folder("gs://b/models/x/")
    assert files(folder) == model
    assert sorted(storage.sent) == sorted(f"models/x/{name}" for name in model)
    storage.sent.clear()
    storage.objects["models/x/config.json"] = b"[]"
    assert cloud_storage.fetch_folder("gs://b/models/x/") == folder
    assert storage.sent == ["models/x/config.json"]


def test_a_file_that_arrives_otherwise_is_refused_and_not_kept(storage: Storage) -> None:
    storage.objects = {"x/config.json": b"{}"}
    storage.damage = b"}"
    with pytest.raises(SettingError, match=r"config\.json did not arrive whole: 3 bytes"):
        cloud_storage.fetch_folder("gs://b/x")
    storage.damage = b""
    assert files(cloud_storage.fetch_folder("gs://b/x")) == {"config.json": b"{}"}


@pytest.mark.parametrize(
    ("uri", "cause"),
    [
        ("s3://b/x", "is no folder of Cloud Storage"),
        ("gs://", "is no folder of Cloud Storage"),
        ("gs://b/empty", "has no files"),
        ("gs://other/x", "cannot be read: HTTP 404"),
        ("gs://b/bad", "is no name of a file in a folder"),
    ],
)
def test_what_cannot_be_fetched_is_refused_by_name(storage: Storage, uri: str, cause: str) -> None:
    storage.objects = {"bad/../../x": b""}
    with pytest.raises(SettingError, match=f"^AIP_STORAGE_URI: .*{cause}"):
        cloud_storage.fetch_folder(uri)


def test_a_token_that_may_not_read_is_refused(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.TOKEN", "t1")
    storage.objects = {"x/config.json": b"{}"}
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", cloud_storage.API_URL)  # it gets no token
    with pytest.raises(SettingError, match="cannot be read: HTTP 403"):
        cloud_storage.fetch_folder("gs://b/x")
