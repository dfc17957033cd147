import os
import subprocess
import sys
from pathlib import Path

import pytest
import redis

from deploy.serve.embedded_broker import PREFIX, embedded
from tests.support import brokers


def test_restarted_broker_keeps_its_port_and_data() -> None:
    with embedded() as broker:
        for number in range(3):
            process = brokers.start(broker)
            with redis.Redis.from_url(broker.url) as client:
                assert client.incr("starts") == number + 1
            process.kill()
            process.wait()


def test_abandoned_directories_are_removed_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    killed = "import os, signal\nfrom deploy.serve.embedded_broker import embedded\n"
    killed += "with embedded(): os.kill(os.getpid(), signal.SIGKILL)"
    subprocess.run([sys.executable, "-c", killed], env=os.environ | {"TMPDIR": str(tmp_path)})
    [abandoned] = tmp_path.iterdir()
    fresh = tmp_path / f"{PREFIX}which-is-being-made"
    fresh.mkdir()
    with embedded() as first:
        for directory in (abandoned, first.directory):
            (directory / "data").mkdir()
            os.utime(directory, (0, 0))
        with embedded() as second:
            assert set(tmp_path.iterdir()) == {fresh, first.directory, second.directory}
    assert list(tmp_path.iterdir()) == [fresh]
