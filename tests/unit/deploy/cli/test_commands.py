"""Commands that ask a gateway or a directory: what they ask for, and what they print.
Which fleet a command acts on: one that is named, that of this folder, or this user's only one.
"""

import asyncio
import contextlib
import copy
import io
import json
import os
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console
from rich.table import Table

from common.broker.client import connect
from common.broker.directory import DirectoryClient, PoolEntry
from common.messages.events import TimelineEvent
from common.settings.settings import SettingError
from deploy.cli import admin, batch, status, target
from deploy.cli.admin import check_return, choose_worker
from deploy.cli.client import ServerError, new_client, print_lines
from deploy.cli.status import fetch_snapshot
from deploy.launcher.control_socket import Order, RunningFleet, Say, listening
from deploy.launcher.embedded_broker import Broker
from tests.support import brokers
from tests.support.fleet.batchers import batching
from tests.support.fleet.gateways import answering
from tests.support.fleet.scripted_worker import Answer
from tests.support.forks.command import tokenfleet
from tests.support.machine.ports import free_port
from tests.support.other_servers import FLEET
from tests.support.source_tree import python_path

# --- batches ------------------------------------------------------------------------------------------------

BATCH = {
    "status": "completed",
    "request_counts": {"completed": 2, "failed": 0, "total": 2},
    **dict.fromkeys(("output_file_id", "error_file_id", "errors")),
}


@pytest.mark.parametrize(
    ("away_s", "code", "last"), [(600.0, 0, "completed: 2 of 2"), (-1.0, 1, "tokenfleet: no server answers")]
)
def test_a_batch_is_waited_for_while_its_server_is_away(
    away_s: float,
    code: int,
    last: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    answers = iter([None, httpx.Response(503, text="starting"), httpx.Response(200, json=BATCH)])

    def answer(request: httpx.Request) -> httpx.Response:
        if (found := next(answers)) is None:
            raise httpx.ConnectError("refused")
        return found

    transport = httpx.MockTransport(answer)
    monkeypatch.setattr(
        admin, "new_client", lambda *_: httpx.Client(base_url="http://fleet", transport=transport)
    )
    monkeypatch.setattr(batch, "POLL_S", 0.0)
    monkeypatch.setattr(batch, "AWAY_S", away_s)
    words = ["batch", "--id", "batch_1", "-o", str(tmp_path / "answers.jsonl"), "--url", "http://fleet"]
    assert admin.main(words) == code
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith(last)
    assert [line for line in lines[:-1] if "asking again: " not in line] == []


def test_a_place_for_answers_that_cannot_be_used_is_refused_at_once(tmp_path: Path, ask: "Ask") -> None:
    with pytest.raises(SettingError, match=f"^FILE: {tmp_path} cannot be used: Is a directory"):
        ask("--id", "batch_1", "-o", str(tmp_path), command="batch")


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
    for strange in ("~no-such-user/x", f"/{'x' * 300}"):  # the server says what is wrong with it
        body = {"lora_name": "sql", "lora_path": strange, "load_inplace": False}
        assert ask("load", f"sql={strange}") == (0, [("/v1/load_lora_adapter", body)])
    assert ask("unload", "sql") == (0, [("/v1/unload_lora_adapter", {"lora_name": "sql"})])
    assert capsys.readouterr().out == "Success\n" * 5


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


# --- status -------------------------------------------------------------------------------------------------


def later(seconds: float, tokens: int) -> dict[str, Any]:
    """The fleet after some time; its worker has published `tokens` more."""
    fleet = copy.deepcopy(FLEET)
    fleet["time_s"] += seconds
    fleet["processes"][0]["tokens"] += tokens
    return fleet


def test_rates_use_the_clock_of_the_fleet() -> None:
    def rate(last: dict[str, Any]) -> float | None:
        found = status.with_rates(FLEET, last)
        assert found["processes"][0]["tokens_per_s"] == found["tokens_per_s"]
        return found["tokens_per_s"]  # type: ignore[no-any-return]

    assert rate(later(4, 100)) == 25.0
    assert rate(later(2, -900)) == 0.0, "counted anew"
    assert rate(FLEET) is None, "the same moment"


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_shows_every_process(width: int) -> None:
    fleet = later(2, 86)
    broker = {"kind": "broker", "id": "broker", "state": "ready", "age_s": 0.0, "commands_per_s": 12_345}
    fleet["processes"].append(broker | {"pid": 123_456})
    out = io.StringIO()
    Console(file=out, width=width, color_system=None).print(status.view(FLEET, fleet, width))
    text = out.getvalue()
    head, requests, health, _, _, *lines = text.splitlines()
    assert (head.rstrip(), health.rstrip()) == ("tiny  pool default", "1 worker ready")
    assert "3 live, 1 waiting of 1 024   43.0 tokens/s" in requests and "…" not in text
    assert [line.split()[0] for line in lines] == ["broker", "gateway", "batcher", "worker"]
    assert "12 345 ops/s" in lines[0] and "3 streams" in lines[1]
    assert "1 waiting" in lines[2] and "3.5 s" in lines[2]
    wide = ["w0-aaaa", "here", "41"] if width == 120 else []
    assert all(word in lines[3] for word in ("w0", "ready", "2/256", "12/4 096", "43.0", "0.2 s", *wide))


def test_a_narrow_table_has_the_hosts_of_replicas() -> None:
    replicas = [FLEET["processes"][0] | {"id": f"w0-{i}", "host": f"fleet-worker-7d9f8-x{i}"} for i in (1, 2)]
    out = io.StringIO()
    fleet = FLEET | {"processes": replicas}
    Console(file=out, width=80, color_system=None).print(status.view(fleet, fleet, 80))
    text = "".join(out.getvalue().split())
    assert "…" not in text and text.count("x1") == text.count("x2") == 1


def test_outside_a_terminal_one_table_is_printed(
    ask: Ask, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status, "REFRESH_S", 0.0)

    def shown(*words: str, **fleet: Any) -> tuple[int, str]:
        return ask(*words, command="status", reply=FLEET | fleet)[0], capsys.readouterr().out

    code, table = shown()
    assert code == 0 and "w0" in table
    code, text = shown("--json")
    assert code == 0 and json.loads(text)["processes"][0]["tokens_per_s"] is None
    for state, said, code in (("warn", "1 of 2 workers ready", 0), ("bad", "no batcher is active", 1)):
        found, table = shown("--once", health={"state": state, "text": said})
        assert found == code and said in table


async def test_the_table_of_a_real_gateway_has_every_process(
    broker: Broker, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status, "REFRESH_S", 0.0)
    async with batching(broker.url), answering(broker.url, Answer([])) as (worker, _, client):
        assert await asyncio.to_thread(admin.main, ["status", "--url", str(client.base_url)]) == 0
    head, requests, health, *lines = capsys.readouterr().out.splitlines()
    assert (head, health) == ("smollm2  pool default", "1 worker ready") and "0 live" in requests
    assert {line.split()[0] for line in lines[2:]} == {"broker", "gateway", "batcher", "worker"}
    assert any(
        line.split()[:2] == ["worker", worker.incarnation.split("-")[0]] and "0/64" in line for line in lines
    )


# --- explain ------------------------------------------------------------------------------------------------

W0, W1 = "w0-9e47064c", "w1-bc844561"


LIFE = [
    TimelineEvent(10_000, "queued", num_tokens=5),
    TimelineEvent(10_250, "placed", W0, 1),
    TimelineEvent(10_300, "prefilled", W0, 1, 1),
    TimelineEvent(11_000, "died", W0, 1, 37),
    TimelineEvent(11_010, "placed", W1, 2, 37),
    TimelineEvent(11_800, "prefilled", W1, 2, 38),
    TimelineEvent(12_000, "ended", W1, 2, 50, "timeout"),
]
OWN_ID = "de57631b1f34491f82900fbb5c26f525"


def test_every_choice_has_a_timeline(ask: Ask, capsys: pytest.CaptureFixture[str]) -> None:
    told = [asdict(event) for event in LIFE]
    reply = {"request_id": "a/b", "timelines": {"a/b.0": told, "a/b.1": told[:1]}}
    assert ask("a/b", command="explain", reply=reply) == (0, [("/fleet/requests/a%2Fb", None)])
    title, head, *lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert (title, head) == (
        ["request", "a/b.0"],
        "time after s what worker attempt tokens cached why".split(),
    )
    assert lines[len(LIFE)] == ["request", "a/b.1"]
    assert [" ".join(line[2:]) for line in lines[: len(LIFE)]] == [
        "0.000 queued 5",
        f"0.250 placed {W0} 1 0",
        f"0.300 prefilled {W0} 1 1",
        f"1.000 died {W0} 1 37",
        f"1.010 placed {W1} 2 37",
        f"1.800 prefilled {W1} 2 38",
        f"2.000 ended {W1} 2 50 timeout: the request was not finished before its deadline",
    ]


@pytest.mark.parametrize("prefix", ["", "cmpl-", "chatcmpl-", "resp_"])
def test_the_id_of_an_answer_names_its_request(prefix: str, ask: Ask) -> None:
    for given, asked in ((prefix + OWN_ID, OWN_ID), (f"{prefix}mine", f"{prefix}mine")):
        assert ask(given, command="explain", status=404)[1] == [(f"/fleet/requests/{asked}", None)]


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


# --- target -------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with folders of fleets in it, in which launchers have their sockets: its name is short."""
    for name in ("PORT", "REDIS_URL", "DIRECTORY_URL", "POOL"):
        monkeypatch.delenv(name, raising=False)
    tmp_path_factory.getbasetemp()  # pytest's is outside this one, which ends with the test
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
        monkeypatch.setenv("REDIS_URL", "no-url")
        assert await found(True, "--redis-url") == "no-url"  # refused by who connects to it


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
    environ = os.environ | {"TMPDIR": str(folder), "PYTHONPATH": python_path()}
    with brokers.running() as broker:
        async with running(folder / "mine", 1, broker.url):
            for own, code, problem in (
                ("mine", 1, "there is no worker 'w9'; those of the pool 'pool1': none"),
                ("elsewhere", os.EX_CONFIG, f"has --redis-url {broker.url}"),
            ):
                monkeypatch.chdir(folder / own)
                done = await asyncio.to_thread(tokenfleet, "drain", "w9", environ=environ)
                assert done.returncode == code and problem in done.stderr.decode()
