import os
import stat
from pathlib import Path

import pytest

from common.model_files import make_cache_folder


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_nobody_else_may_write_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, umask: int) -> None:
    """Neither to one that is made, nor to one that an earlier version has made."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    before = os.umask(umask)
    try:
        (tmp_path / "cache" / "tokenfleet").mkdir(parents=True)
        folder = make_cache_folder("native")
    finally:
        os.umask(before)
    assert folder == tmp_path / "cache" / "tokenfleet" / "native"
    for path in (folder, folder.parent):
        assert not stat.S_IMODE(path.stat().st_mode) & (stat.S_IWGRP | stat.S_IWOTH)
