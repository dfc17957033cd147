"""Cloud storage: fetches the folder that Vertex names in AIP_STORAGE_URI, `gs://bucket/folder`; s3:// works
too. fsspec's stores read it, with the credentials of the machine. A folder that is here is not fetched again.
"""

import hashlib
import os
import sys
import tempfile
from pathlib import Path, PurePosixPath

from common.model_files import CACHE_SETTING, cache_errors
from common.process.logs import plural
from common.process.machine import cache_folder, make_cache_folder
from common.settings.settings import SettingError

VARIABLE = "AIP_STORAGE_URI"
SCHEMES = ("gs://", "s3://")


def fetch_folder(uri: str) -> Path:
    """Fetch a folder of a bucket, and return where it is on this machine.

    Raises:
        SettingError: the address is none of a cloud's, the folder is empty, it cannot be read, its store is
            not installed, or the disk is full.
    """
    from fsspec.core import url_to_fs  # 50 ms, which other starts need not wait for

    scheme, _, folder = uri.partition("://")
    if f"{scheme}://" not in SCHEMES or not folder.strip("/"):
        raise SettingError(VARIABLE, f"{uri!r} is no folder of Cloud Storage, such as gs://bucket/model")
    with cache_errors(CACHE_SETTING, cache_folder("cloud")):
        target = make_cache_folder("cloud") / hashlib.sha256(uri.encode()).hexdigest()[:32]
    if target.is_dir():
        return target
    try:
        with cache_errors(CACHE_SETTING, target), tempfile.TemporaryDirectory(dir=target.parent) as part:
            store, root = url_to_fs(uri)
            files = store.find(root)
            if not files:
                raise SettingError(VARIABLE, f"{uri} has no files")
            own = [PurePosixPath(name.removeprefix(root.rstrip("/") + "/")) for name in files]
            if outside := next((path for path in own if path.is_absolute() or ".." in path.parts), None):
                raise SettingError(VARIABLE, f"'{outside}' is no name of a file in a folder")
            print(f"fetching {plural(len(files), 'file')} of {uri}", file=sys.stderr, flush=True)
            store.get(files, [os.fspath(Path(part, "files", path)) for path in own])
            Path(part, "files").rename(target)
    except SettingError:
        raise
    except ImportError as error:
        cause = f"{scheme}:// is not installed here: pip install 'tokenfleet[cloud]' ({error})"
        raise SettingError(VARIABLE, cause) from error
    except Exception as error:  # each store has its own
        cause = " ".join(str(error).split()) or type(error).__name__
        raise SettingError(VARIABLE, f"{uri} cannot be read: {cause}") from error
    return target
