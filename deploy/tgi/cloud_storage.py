"""Cloud Storage: fetches the folder `gs://bucket/folder` that Vertex names in AIP_STORAGE_URI.

The JSON API lists and sends objects (https://cloud.google.com/storage/docs/json_api); the machine's metadata
server gives the token (https://cloud.google.com/compute/docs/access/authenticate-workloads). Files that are
here whole are not fetched again.
"""

import base64
import hashlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote

import httpx

from common.model_files import CACHE_SETTING, cache_errors, cache_folder, make_cache_folder
from common.settings.settings import SettingError

VARIABLE = "AIP_STORAGE_URI"
SCHEME = "gs://"
API_URL = "https://storage.googleapis.com"
METADATA_HOST = "metadata.google.internal"
TOKEN_PATH = "/computeMetadata/v1/instance/service-accounts/default/token"
TIMEOUT_S = 60.0
CHUNK_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object of a bucket.

    Attributes:
        md5: of its bytes, in base64; empty for one that was composed of others.
    """

    name: str
    num_bytes: int
    md5: str


def fetch_folder(uri: str) -> Path:
    """Fetch a folder of a bucket, and return where it is on this machine.

    Raises:
        SettingError: the address is none of Cloud Storage, the folder is empty, it cannot be read, or the
            disk is full.
    """
    bucket, _, folder = uri.removeprefix(SCHEME).strip("/").partition("/")
    if not uri.startswith(SCHEME) or not bucket:
        raise SettingError(VARIABLE, f"{uri!r} is no folder of Cloud Storage, such as gs://bucket/model")
    prefix = f"{folder}/" if folder else ""
    with cache_errors(CACHE_SETTING, cache_folder("cloud")):
        target = make_cache_folder("cloud") / hashlib.sha256(uri.encode()).hexdigest()[:32]
    try:
        with cache_errors(CACHE_SETTING, target), connect() as client:
            found = [one for one in list_objects(client, bucket, prefix) if not one.name.endswith("/")]
            if not found:
                raise SettingError(VARIABLE, f"{uri} has no files")
            for one in found:
                fetch(client, bucket, one, target / relative_path(one.name, prefix))
    except httpx.HTTPStatusError as error:
        raise SettingError(VARIABLE, f"{uri} cannot be read: HTTP {error.response.status_code}") from error
    except httpx.HTTPError as error:
        raise SettingError(VARIABLE, f"{uri} cannot be read: {error or type(error).__name__}") from error
    return target


def connect() -> httpx.Client:
    """Return a client of the storage, or of an emulator (STORAGE_EMULATOR_HOST), which needs no token."""
    emulator = os.environ.get("STORAGE_EMULATOR_HOST")
    if emulator:
        return httpx.Client(
            base_url=emulator if "://" in emulator else f"http://{emulator}", timeout=TIMEOUT_S
        )
    host = os.environ.get("GCE_METADATA_HOST", METADATA_HOST)
    answer = httpx.get(f"http://{host}{TOKEN_PATH}", headers={"Metadata-Flavor": "Google"}, timeout=TIMEOUT_S)
    token = answer.raise_for_status().json()["access_token"]
    return httpx.Client(base_url=API_URL, headers={"authorization": f"Bearer {token}"}, timeout=TIMEOUT_S)


def list_objects(client: httpx.Client, bucket: str, prefix: str) -> Iterator[StoredObject]:
    """Yield the objects whose names begin with `prefix`, page by page."""
    options: dict[str, str] = {"prefix": prefix}
    while True:
        answer = client.get(f"/storage/v1/b/{quote(bucket, safe='')}/o", params=options)
        page: dict[str, Any] = answer.raise_for_status().json()
        for item in page.get("items", ()):
            yield StoredObject(item["name"], int(item["size"]), item.get("md5Hash", ""))
        if not page.get("nextPageToken"):
            return
        options["pageToken"] = page["nextPageToken"]


def relative_path(name: str, prefix: str) -> PurePosixPath:
    """Return an object's path in the folder. Raises SettingError for one that would lie outside of it."""
    path = PurePosixPath(name.removeprefix(prefix))
    if path.is_absolute() or ".." in path.parts:
        raise SettingError(VARIABLE, f"{name!r} is no name of a file in a folder")
    return path


def fetch(client: httpx.Client, bucket: str, one: StoredObject, target: Path) -> None:
    """Fetch one object, unless it is here whole. Raises SettingError for other bytes than were listed."""
    if is_whole(target, one):
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    print(f"fetching {one.name} ({one.num_bytes / 2**20:.1f} MiB)", file=sys.stderr, flush=True)
    part = target.with_name(f"{target.name}.part")
    path = f"/storage/v1/b/{quote(bucket, safe='')}/o/{quote(one.name, safe='')}"
    with part.open("wb") as file, client.stream("GET", path, params={"alt": "media"}) as answer:
        for chunk in answer.raise_for_status().iter_bytes(CHUNK_BYTES):
            file.write(chunk)
    if not is_whole(part, one):
        raise SettingError(VARIABLE, f"{one.name} did not arrive whole: {part.stat().st_size} bytes")
    part.replace(target)


def is_whole(path: Path, one: StoredObject) -> bool:
    """Whether a file has an object's bytes; only their number is compared where the storage has no MD5."""
    if not path.is_file() or path.stat().st_size != one.num_bytes:
        return False
    if not one.md5:
        return True
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False))
    return base64.b64encode(digest.digest()).decode() == one.md5
