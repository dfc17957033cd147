"""`tokenfleet models`: weights are checked, kept in the directory and shown."""

import asyncio

import pytest

from common.broker.client import connect
from common.broker.directory import DirectoryClient, PoolEntry
from common.settings.settings import SettingError
from deploy.cli import admin
from deploy.launcher.embedded_broker import Broker


@pytest.fixture
def url(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> str:
    """A directory with pools `a` and `b`."""

    async def publish() -> None:
        async with connect(broker.url) as redis:
            directory = DirectoryClient(redis)
            await directory.publish(
                "a", PoolEntry("redis://a:6379", ["mine"], num_ready=2, waiting=3, rows=4)
            )
            await directory.publish("b", PoolEntry("redis://b:6379", ["mine"]))

    monkeypatch.setattr("setproctitle.setproctitle", lambda _: None)
    asyncio.run(publish())
    return broker.url


def lines(capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    return [line.split() for line in capsys.readouterr().out.splitlines()[1:]]


def test_pools_and_their_queues_are_listed(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert admin.main(["models", "list", "--directory-url", url]) == 0
    assert lines(capsys) == [
        ["mine", "a", "live", "2", "3", "4", "redis://a:6379"],
        ["mine", "b", "no", "worker", "0", "0", "0", "redis://b:6379"],
    ]


def test_weights_are_set_changed_and_forgotten(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REDIS_URL", url)
    for words, shares in ((["a=90", "b=10"], ["90%", "10%"]), (["b=1", "a=0"], ["100%", "0%"])):
        assert admin.main(["models", "set", "new", *words]) == 0
        assert [line[2] for line in lines(capsys) if line[0] == "new"] == shares
    admin.main(["models", "unset", "new"])
    assert all(line[0] == "mine" for line in lines(capsys))
    with pytest.raises(SettingError, match="has no weights"):
        admin.main(["models", "unset", "new"])


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["new", "a"], "'a' is not a pool and a weight"),
        (["new", "a=-1"], "a weight of 0 to 1000000"),
        (["new", "a=nan"], "a weight of 0"),
        (["new", "=1"], "a pool and a weight"),
        (["new", "a=0", "b=0"], "all are 0"),
        (["new", "a=1", "a=2"], "named twice"),
        (["new", "a=1", "c=2"], "there is no pool 'c'; those of the directory: a, b"),
        (["n" * 201, "a=1"], "1 to 200 characters"),
        (["", "a=1"], "1 to 200 characters"),
        (["new"], "is missing"),
    ],
)
def test_what_cannot_be_set_is_refused(url: str, words: list[str], why: str) -> None:
    with pytest.raises(SettingError, match=why):
        admin.main(["models", "set", *words, "--directory-url", url])


def test_a_broker_that_does_not_answer_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert admin.main(["models", "list", "--directory-url", "redis://127.0.0.1:1"]) == 1
    assert "no connection to the broker" in capsys.readouterr().err
    with pytest.raises(SettingError, match="DIRECTORY_URL: is not a URL"):
        admin.main(["models", "list", "--directory-url", "secret"])
