"""Which fleet a command acts on: one that is named, that of this folder, or this user's only one."""

import asyncio
import contextlib
import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest

from common.settings.settings import SettingError
from deploy.cli import target
from deploy.cli.client import ServerError, new_client
from deploy.cli.status import fetch_snapshot
from deploy.launcher.control_socket import Order, RunningFleet, Say, listening
from tests.support import brokers
from tests.support.forks.command import tokenfleet
from tests.support.machine.ports import free_port


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with folders of fleets in it, in which launchers have their sockets: its name is short."""
    for name in ("PORT", "REDIS_URL", "DIRECTORY_URL", "POOL"):
        monkeypatch.delenv(name, raising=False)
    with tempfile.TemporaryDirectory() as name:
        monkeypatch.setattr("tempfile.tempdir", name)
        for own in ("mine", "theirs", "elsewhere"):
            (Path(name) / own).mkdir()
        yield Path(name).resolve()


@contextlib.asynccontextmanager
async def running(folder: Path, number: int, redis_url: str = "") -> AsyncIterator[RunningFleet]:
    """A launcher that says it runs a fleet, and carries no order out."""

    async def carry_out(_: Order, __: Say) -> None:
        raise AssertionError

    url = f"http://127.0.0.1:{30_000 + number}"
    broker = redis_url or f"redis://:secret@b{number}:6379"
    fleet = RunningFleet(number, str(folder), "tokenfleet serve", url, broker, broker, f"pool{number}")
    async with listening(fleet, carry_out):
        yield fleet


async def found(changes: bool, flag: str = "--url", given: str | None = None) -> str:
    return (await asyncio.to_thread(target.find, flag, given, changes))[0]


async def test_the_fleet_of_this_folder_is_taken_and_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async with running(folder / "mine", 1) as own, running(folder / "theirs", 2):
        monkeypatch.chdir(folder / "mine")
        assert await found(changes=True) == own.url
        assert capsys.readouterr().err == f"tokenfleet: {own.url} (the fleet of this folder)\n"
        assert await found(True, "--pid") == "1"
        assert await found(True, "--directory-url") == own.directory_url
        assert "secret" not in capsys.readouterr().err


async def test_what_is_named_is_taken_wherever_it_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(folder / "mine", 1), running(folder / "theirs", 2):
        monkeypatch.chdir(folder / "mine")
        assert await found(True, given="http://a:1") == "http://a:1"
        monkeypatch.setenv("PORT", "30002")
        assert await found(changes=True) == "http://127.0.0.1:30002"
        monkeypatch.chdir(folder / "theirs")
        assert await found(True, "--pid") == "2"
        monkeypatch.setenv("REDIS_URL", "redis://a:2")
        assert await found(True, "--directory-url") == "redis://a:2"


async def test_a_fleet_that_was_searched_for_is_read_but_not_changed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder / "elsewhere")
    async with running(folder / "theirs", 2) as other:
        assert await found(changes=False) == other.url
        assert f"{other.url} (the fleet of {other.folder}; this folder runs none)" in capsys.readouterr().err
        with pytest.raises(SettingError, match=f"^--url: .* that of {other.folder} has --url {other.url}$"):
            await found(changes=True)
        with pytest.raises(SettingError, match=r"has --pid 2$"):
            await found(True, "--pid")
        with pytest.raises(SettingError, match=r"has --directory-url redis://b2:6379$"):
            await found(True, "--directory-url")
        async with running(folder / "mine", 1):
            with pytest.raises(SettingError, match=r"several fleets run: .*30001 .*30002"):
                await found(changes=False)


async def test_without_any_fleet_port_3000_is_asked_and_a_broker_is_needed() -> None:
    assert await found(changes=True) == "http://127.0.0.1:3000"
    with pytest.raises(SettingError, match=r"^--directory-url: is missing, and no `tokenfleet serve`"):
        await found(False, "--directory-url")
    with pytest.raises(SettingError, match=r"^--pid: is missing"):
        await found(True, "--pid")


async def test_where_nobody_answers_this_users_fleets_are_named(folder: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    async with running(folder / "theirs", 2) as other:
        with (
            new_client(httpx.Client, url, 1.0, None) as client,
            pytest.raises(ServerError, match=f"no server answers at {url} .*your fleet is at {other.url}"),
        ):
            await asyncio.to_thread(fetch_snapshot, client)


async def test_a_command_at_a_broker_acts_on_the_fleet_of_its_folder_only(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = os.environ | {"TMPDIR": str(folder)}
    with brokers.running() as broker:
        async with running(folder / "mine", 1, broker.url):
            for own, code, problem in (
                ("mine", 1, "there is no worker 'w9'; those of the pool 'pool1': none"),
                ("elsewhere", os.EX_CONFIG, f"has --redis-url {broker.url}"),
            ):
                monkeypatch.chdir(folder / own)
                done = await asyncio.to_thread(tokenfleet, "drain", "w9", environ=environ)
                assert done.returncode == code and problem in done.stderr.decode()
