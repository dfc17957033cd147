"""Commands that ask a gateway or a directory: what they ask for, and what they print."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.table import Table

from common.broker.client import connect
from common.broker.directory import DirectoryClient, PoolEntry
from common.settings.settings import SettingError
from deploy.cli import admin
from deploy.cli.admin import check_return, choose_worker
from deploy.cli.client import ServerError, print_lines
from deploy.launcher.embedded_broker import Broker

# --- adapters -----------------------------------------------------------------------------------------------

Ask = Callable[..., tuple[int, list[tuple[str, Any]]]]
LISTED = {
    "num_workers": 2,
    "adapters": [
        {
            "name": "sql",
            "state": "ready",
            "num_workers": 1,
            "rank": 8,
            "base_model": "smollm2",
            "path": "/adapters/sql",
            "refused": {"w1-0": "its files are gone"},
        }
    ],
}


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch) -> Ask:
    def run(
        *words: str, command: str = "adapters", status: int = 200, reply: Any = "Success"
    ) -> tuple[int, list[tuple[str, Any]]]:
        asked: list[tuple[str, Any]] = []

        def answer(request: httpx.Request) -> httpx.Response:
            asked.append(
                (request.url.raw_path.decode(), json.loads(request.content) if request.content else None)
            )
            return httpx.Response(status, **({"text": reply} if isinstance(reply, str) else {"json": reply}))

        transport = httpx.MockTransport(answer)
        monkeypatch.setattr(
            admin, "new_client", lambda *_: httpx.Client(base_url="http://fleet", transport=transport)
        )
        return admin.main([command, *words, "--url", "http://fleet"]), asked

    return run


def test_an_adapter_is_loaded_from_its_whole_path_and_unloaded(
    ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sql").mkdir()
    monkeypatch.chdir(tmp_path)
    body = {"lora_name": "sql", "lora_path": str(tmp_path / "sql"), "load_inplace": True}
    assert ask("load", "--replace", "sql=sql") == (0, [("/v1/load_lora_adapter", body)])
    hub = {"lora_name": "org/sql", "lora_path": "org/sql@main", "load_inplace": False}
    assert ask("load", "org/sql@main") == (0, [("/v1/load_lora_adapter", hub)])
    assert ask("unload", "sql") == (0, [("/v1/unload_lora_adapter", {"lora_name": "sql"})])
    assert capsys.readouterr().out == "Success\n" * 3


def test_adapters_are_listed_with_the_workers_that_refuse_them(
    ask: Ask, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ask("list", reply=LISTED)[0] == 0
    head, line = capsys.readouterr().out.splitlines()
    assert head.split() == ["adapter", "state", "workers", "rank", "base", "model", "path"]
    assert "1 of 2; w1-0: its files are gone" in line
    ask("list", reply={"num_workers": 2, "adapters": []})
    assert capsys.readouterr().out == "there are no adapters\n"


def test_a_refusal_is_one_line(ask: Ask, capsys: pytest.CaptureFixture[str]) -> None:
    assert ask("unload", "x", status=404, reply={"error": {"message": "There is no adapter 'x'"}})[0] == 1
    assert capsys.readouterr().err == "tokenfleet: the server answers 404: There is no adapter 'x'\n"
    with pytest.raises(SettingError, match=r"^ADAPTER: 'a b=c' is not an adapter"):
        ask("load", "a b=c")


# --- models -------------------------------------------------------------------------------------------------


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


def test_a_broker_that_does_not_answer_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert admin.main(["models", "list", "--directory-url", "redis://127.0.0.1:1"]) == 1
    assert "no connection to the broker" in capsys.readouterr().err
    with pytest.raises(SettingError, match="DIRECTORY_URL: is not a URL"):
        admin.main(["models", "list", "--directory-url", "secret"])


# --- drain --------------------------------------------------------------------------------------------------

WORKERS = ["w0-1f", "w0-2e.2", "w1-3d"]


@pytest.mark.parametrize(("word", "worker"), [("w1", "w1-3d"), ("w0-1f", "w0-1f"), ("w0-2e.2", "w0-2e.2")])
def test_an_id_or_the_only_worker_of_a_name_is_chosen(word: str, worker: str) -> None:
    assert choose_worker(WORKERS, word, "default") == worker


@pytest.mark.parametrize(
    ("word", "problem"),
    [("w2", "there is no worker 'w2'"), ("w0", "2 workers are named 'w0'"), ("w", "there is no worker 'w'")],
)
def test_other_words_are_refused_with_the_workers_there_are(word: str, problem: str) -> None:
    with pytest.raises(ServerError, match=f"^{problem}; those of the pool 'default': w0-1f, w0-2e.2"):
        choose_worker(WORKERS, word, "default")
    with pytest.raises(ServerError, match=r"those of the pool 'b': none$"):
        choose_worker([], word, "b")


def test_a_worker_that_was_cut_off_and_is_back_is_not_said_to_be_gone() -> None:
    check_return("w0-2e", ["w0-1f", "w1-3d.2"])
    with pytest.raises(
        ServerError, match=r"^w0-2e was cut off, and is back as w0-2e\.2, which is not drained$"
    ):
        check_return("w0-2e", WORKERS)


# --- usage --------------------------------------------------------------------------------------------------

NUMBERS = {
    "requests": 2,
    "prompt_tokens": 1200,
    "cached_tokens": 0,
    "completion_tokens": 34,
    "speculated_tokens": 0,
    "total_tokens": 1234,
}


def test_a_line_for_each_group_and_one_for_all(ask: Ask, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"key": "k1", "model": "", **NUMBERS}
    body = {"group_by": ["key", "model"], "data": [row], "total": NUMBERS, "from": "a", "to": "b"}
    asked = ask("--from", "2026-11-01", "--group-by", "key,model", command="usage", reply=body)
    assert asked == (0, [("/usage?from=2026-11-01&group_by=key%2Cmodel", None)])
    period, head, line, last = capsys.readouterr().out.splitlines()
    assert period == "a to b"
    assert head.split()[:3] == ["key", "model", "requests"]
    assert line.split() == ["k1", "-", "2", "1,200", "0", "34", "0", "1,234"]
    assert last.split()[0] == "total"


# --- client -------------------------------------------------------------------------------------------------


def test_lines_for_a_pipe_are_not_folded_and_have_no_spaces_at_their_ends(
    capsys: pytest.CaptureFixture[str],
) -> None:
    table = Table(box=None, pad_edge=False, show_header=False)
    long = "word " * 30
    table.add_row("a", "ok")
    table.add_row("b", long)
    print_lines("title", table)
    assert capsys.readouterr().out == f"title\na  ok\nb  {long.rstrip()}\n"
