import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import redis

from common.settings.settings import SettingError
from deploy.serve.embedded_broker import PREFIX, Broker, embedded, running_url
from tests.support import brokers
from tests.support.waiting import wait_until_sync


def test_restarted_broker_keeps_its_port_and_data() -> None:
    with embedded(3000) as broker:
        for number in range(3):
            process = brokers.start(broker)
            with redis.Redis.from_url(broker.url) as client:
                assert client.incr("starts") == number + 1
            process.kill()
            process.wait()


def test_its_file_is_written_anew_before_it_is_long_to_read() -> None:
    """Its first part is a snapshot then, and what was overwritten is gone."""
    least, most = 24 * 2**20, 16 * 2**20
    with embedded(3000) as broker:
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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    killed = "import os, signal\nfrom deploy.serve.embedded_broker import embedded\n"
    killed += "with embedded(3000): os.kill(os.getpid(), signal.SIGKILL)"
    subprocess.run([sys.executable, "-c", killed], env=os.environ | {"TMPDIR": str(tmp_path)})
    [abandoned] = tmp_path.iterdir()
    fresh = tmp_path / f"{PREFIX}which-is-being-made"
    fresh.mkdir()
    with embedded(3000) as first:
        for directory in (abandoned, first.directory):
            (directory / "data").mkdir()
            os.utime(directory, (0, 0))
        with embedded(3000) as second:
            assert set(tmp_path.iterdir()) == {fresh, first.directory, second.directory}
    assert list(tmp_path.iterdir()) == [fresh]


def test_the_broker_of_the_only_fleet_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / f"{PREFIX}abandoned").mkdir()
    (tmp_path / f"{PREFIX}abandoned" / "url").write_text("redis://127.0.0.1:1/0")
    with pytest.raises(SettingError, match=r"^REDIS_URL: is not set, and no `tokenfleet serve` of this user"):
        running_url()
    with embedded(3000) as first:
        assert running_url() == first.url
        with embedded(3001) as second, pytest.raises(SettingError, match="several fleets run") as refusal:
            running_url()
        assert f"{first.url} of port 3000" in str(refusal.value)
        assert f"{second.url} of port 3001" in str(refusal.value)


def test_one_that_a_test_starts_dies_with_it_whomever_the_test_follows() -> None:
    killed = "import os, signal\nfrom tests.support import brokers\n"
    killed += (
        "with brokers.running() as own: print(own.url, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    words, environ = [sys.executable, "-c", killed], os.environ | {"PARENT_PID": "0"}
    url = subprocess.run(words, env=environ, capture_output=True, text=True).stdout.strip()
    try:
        wait_until_sync(lambda: not brokers.answers(url))
    finally:
        with contextlib.suppress(redis.ConnectionError), redis.Redis.from_url(url) as client:
            client.shutdown(nosave=True)
