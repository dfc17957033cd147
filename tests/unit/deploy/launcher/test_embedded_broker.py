import contextlib
import os
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import redis

from common.settings.settings import SettingError
from deploy.launcher.embedded_broker import PREFIX, Broker, embedded
from tests.support import brokers
from tests.support.waiting import wait_until_sync

NOBODY = 65_534


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder for temporary files, of a short name."""
    with tempfile.TemporaryDirectory() as name:
        monkeypatch.setattr("tempfile.tempdir", name)
        yield Path(name)


@contextlib.contextmanager
def another_user() -> Iterator[None]:
    """Act as a user who owns nothing."""
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def test_no_other_user_of_this_machine_reaches_the_broker() -> None:
    with brokers.running() as broker:
        [server] = [one for one in psutil.process_iter(["cwd"]) if one.info["cwd"] == str(broker.directory)]
        assert not server.net_connections(kind="inet"), "it listens on a port"
        assert stat.S_IMODE(broker.directory.stat().st_mode) == 0o700
        if os.geteuid() == 0:
            with another_user():
                for path in (broker.directory, broker.directory / "appendonlydir"):
                    with pytest.raises(PermissionError):
                        os.listdir(path)
                with socket.socket(socket.AF_UNIX) as client, pytest.raises(PermissionError):
                    client.connect(str(broker.socket_path))
        assert brokers.answers(broker.url), "its owner does"


def test_directories_of_other_users_are_not_removed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Anybody may make one in a folder for all."""
    abandoned = folder / f"{PREFIX}abandoned"
    abandoned.mkdir()
    os.utime(abandoned, (0, 0))
    monkeypatch.setattr("os.geteuid", lambda: os.getuid() + 1)
    with embedded():
        assert abandoned.exists()


def test_a_folder_whose_name_is_too_long_for_a_socket_is_refused_by_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = folder / ("x" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with pytest.raises(SettingError, match=r"^TMPDIR: the embedded broker .*path too long"), embedded():
        pass
    assert not list(deep.iterdir())


def test_the_append_only_file_is_rewritten_before_reading_it_takes_long() -> None:
    """Its first part is a snapshot then, and what was overwritten is gone."""
    least, most = 24 * 2**20, 16 * 2**20
    with embedded() as broker:
        process = brokers.start(broker)
        with redis.Redis.from_url(broker.url) as client:

            def is_short() -> bool:
                """The last rewriting may have begun before most writes: one more, if none goes on."""
                if not client.info("persistence")["aof_rewrite_in_progress"]:
                    client.set("key", bytes(2**20))
                return file_bytes(broker) < most

            for _ in range(least // 2**20):
                client.set("key", bytes(2**20))
            try:
                wait_until_sync(is_short)
            finally:
                process.kill()
                process.wait()


def file_bytes(broker: Broker) -> int:
    with contextlib.suppress(FileNotFoundError):  # just being replaced
        return sum(path.stat().st_size for path in (broker.directory / "appendonlydir").iterdir())
    return sys.maxsize


def test_abandoned_directories_are_removed_at_the_next_start(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = "import os, signal\nfrom deploy.launcher.embedded_broker import embedded\n"
    killed += "with embedded(): os.kill(os.getpid(), signal.SIGKILL)"
    subprocess.run([sys.executable, "-c", killed], env=os.environ | {"TMPDIR": str(folder)})
    [abandoned] = folder.iterdir()
    fresh = folder / f"{PREFIX}which-is-being-made"
    fresh.mkdir()
    with embedded() as first:
        for directory in (abandoned, first.directory):
            (directory / "data").mkdir()
            os.utime(directory, (0, 0))
        with embedded() as second:
            assert set(folder.iterdir()) == {fresh, first.directory, second.directory}
    assert list(folder.iterdir()) == [fresh]
