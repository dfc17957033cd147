"""Redis in the compose stack: at SIGTERM a fleet that drains may finish, and nobody else is waited for."""

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import yaml

from common.broker import acl
from common.broker.keys import Keys
from deploy.launcher.embedded_broker import Broker
from tests.support.machine.ports import free_port
from tests.support.waiting import wait_until_sync

ROOT = Path(__file__).parents[2]
SERVICE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]["redis"]
LOOK_S, LATE_S = 3.0, 30.0

pytestmark = pytest.mark.skipif(
    not (shutil.which("redis-server") and shutil.which("redis-cli")), reason="Debian's redis is not installed"
)


def command(folder: Path) -> list[str]:
    """The command of the service, with its variables' defaults, and the file of users in a folder."""
    words = [re.sub(r"\$\{\w+:-(\w+)\}", r"\1", word) for word in SERVICE["command"]]
    return [word.replace("/tmp/", f"{folder}/") for word in words]


class Entry:
    """The entry point and command of the service, with a fake of the image's own entry point."""

    def __init__(self, folder: Path) -> None:
        images_own = folder / "docker-entrypoint.sh"
        images_own.write_text('#!/bin/sh\nexec "$@"\n')
        images_own.chmod(0o755)
        port = free_port()
        words = [*SERVICE["entrypoint"][:1], ROOT / "deploy/redis_entry.sh", *command(folder)]
        for name in SERVICE["secrets"]:
            (folder / name).write_text(f"{name}\n")
        own = {"REDIS_PORT": str(port), "SECRETS": str(folder), "ACL_FILE": str(folder / "users.acl")}
        own["USERS"] = str(ROOT / "deploy/users.acl")
        environ = os.environ | own | {"PATH": f"{folder}:{os.environ['PATH']}"}
        self.process = subprocess.Popen([*words, "--port", str(port), "--dir", str(folder)], env=environ)
        self.client = redis.Redis(port=port, password="redis_admin")
        wait_until_sync(self.answers)

    def answers(self) -> bool:
        try:
            return bool(self.client.ping())
        except redis.ConnectionError:
            return False

    def show(self, state: str) -> None:
        """Write a state as a gateway's heartbeat does."""
        self.client.hset(Keys("default").gateway("g0-1"), "state", state)

    def ends_within(self, seconds: float) -> bool:
        try:
            return self.process.wait(seconds) == 0
        except subprocess.TimeoutExpired:
            return False


@pytest.fixture
def entry(tmp_path: Path) -> Iterator[Entry]:
    one = Entry(tmp_path)
    yield one
    if one.process.poll() is None:
        one.client.shutdown(nosave=True)
        one.process.wait(LATE_S)
    one.client.close()


def test_the_append_only_file_is_kept_as_short_as_the_embedded_brokers(tmp_path: Path) -> None:
    """A restart reads the file from its beginning."""
    command, option = Broker(tmp_path).command(), "--auto-aof-rewrite-min-size"
    assert SERVICE["command"][SERVICE["command"].index(option) + 1] == command[command.index(option) + 1]


def test_users_have_the_rights_of_their_kinds_and_their_own_passwords(entry: Entry) -> None:
    port = entry.client.get_connection_kwargs()["port"]
    for kind in acl.PROCESSES:
        with redis.Redis(port=port, username=kind, password=f"redis_{kind}") as client:
            assert client.ping()
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.flushall()
    for user, password in (("worker", "redis_gateway"), (None, None)):
        with (
            redis.Redis(port=port, username=user, password=password) as client,
            pytest.raises(redis.exceptions.AuthenticationError),
        ):
            client.ping()
    names: Any = entry.client.acl_users()
    assert set(names) == {"default", *acl.PROCESSES}, "no user without a password"


@pytest.mark.slow
def test_redis_stays_while_a_gateway_drains(entry: Entry) -> None:
    entry.show("ready")
    entry.process.send_signal(signal.SIGTERM)
    entry.show("draining")
    assert not entry.ends_within(LOOK_S + 2) and entry.answers()
    entry.client.delete(Keys("default").gateway("g0-1"))
    assert entry.ends_within(LATE_S)


@pytest.mark.slow
def test_redis_ends_at_once_without_a_fleet_and_soon_with_one_that_does_not_drain(entry: Entry) -> None:
    entry.show("ready")
    begun_s = time.monotonic()
    entry.process.send_signal(signal.SIGTERM)
    assert entry.ends_within(LATE_S)
    assert time.monotonic() - begun_s >= LOOK_S - 1, "a fleet that was told to end, too, has to say so"
