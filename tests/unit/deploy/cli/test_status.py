"""`tokenfleet status` against an answer of GET /fleet."""

import asyncio
import copy
import io
import json
from typing import Any

import pytest
from rich.console import Console

from common.settings.settings import SettingError
from deploy.cli import status
from deploy.launcher.embedded_broker import Broker
from tests.support.fleet.gateways import answering
from tests.support.fleet.scripted_batcher import batching
from tests.support.fleet.scripted_worker import Answer
from tests.support.machine.ports import free_port
from tests.support.other_servers import FLEET, running


def later(seconds: float, tokens: int) -> dict[str, Any]:
    """The fleet after some time; its worker has published `tokens` more."""
    fleet = copy.deepcopy(FLEET)
    fleet["time_s"] += seconds
    fleet["processes"][0]["tokens"] += tokens
    return fleet


def printed(*looks: dict[str, Any], width: int = 120, trouble: str = "") -> str:
    out = io.StringIO()
    Console(file=out, width=width, color_system=None).print(status.view(looks, width, trouble))
    return out.getvalue()


def test_rates_use_the_clock_of_the_fleet() -> None:
    assert status.rates([FLEET]) == {}
    assert status.rates([FLEET, later(1, 10), later(4, 100)]) == {"w0-aaaa": 25.0}
    assert status.rates([FLEET, later(2, -900)]) == {"w0-aaaa": 0.0}, "counted anew"
    assert status.rates([FLEET, later(0, 5)]) == {}, "the same moment"


def test_the_rate_of_a_later_process_counts_from_its_first_snapshot() -> None:
    looks = [FLEET, later(1, 10), later(2, 20)]
    for fleet, tokens in zip(looks[1:], (0, 30), strict=True):
        fleet["processes"].append({"kind": "worker", "id": "w1-dddd", "state": "ready", "tokens": tokens})
    assert status.rates(looks) == {"w0-aaaa": 10.0, "w1-dddd": 30.0}
    assert status.with_rates(looks)["tokens_per_s"] == 40.0


def test_the_table_shows_every_process() -> None:
    text = printed(FLEET, later(2, 86))
    head, health, _, _, *lines = text.splitlines()
    assert health == "1 worker ready"
    assert "tiny  pool default" in head
    assert "3 live, 1 waiting of 1 024" in head
    assert "43.0 tokens/s" in head
    assert [line.split()[0] for line in lines] == ["gateway", "batcher", "worker"]
    assert "3 streams" in lines[0]
    assert status.load({"streams": 1}) == "1 stream"
    assert "1 waiting" in lines[1]
    assert "3.5 s" in lines[1]
    for word in ("w0-aaaa", "here", "41", "ready", "2/256", "12/4 096", "43.0", "0.2 s"):
        assert word in lines[2]


@pytest.mark.parametrize("width", [44, 56, 72, 80, 117, 118])
def test_a_narrow_terminal_keeps_whole_cells(width: int) -> None:
    broker = {
        "kind": "broker",
        "id": "broker",
        "pid": 123_456,
        "state": "ready",
        "age_s": 0.0,
        "commands_per_s": 12_345,
    }
    fleet = later(2, 86)
    fleet["processes"].append(broker)
    text = printed(FLEET, fleet, width=width)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    worker = next(line for line in text.splitlines() if "w0" in line)
    assert all(word in worker for word in ("ready", "2/256", "12/4 096", "43.0"))


def test_absent_keys_are_empty_cells() -> None:
    text = printed({"processes": [{"kind": "worker", "id": "w0"}, {}]})
    assert "w0" in text
    assert "None" not in text


def test_a_lost_connection_is_shown_under_the_last_table() -> None:
    assert (
        printed(FLEET, trouble="no server answers at X").splitlines()[-1]
        == "no server answers at X; asking again"
    )


@pytest.mark.parametrize(
    ("part", "cells"),
    [(0.0, "········"), (1e-6, "▏·······"), (0.5, "████····"), (1.0, "████████"), (7.0, "████████")],
)
def test_a_bar_is_filled_in_eighths(part: float, cells: str) -> None:
    assert status.bar(part).plain == cells


def test_outside_a_terminal_one_table_is_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status, "REFRESH_S", 0.0)
    monkeypatch.setenv("API_KEY", "secret")
    with running("tokenfleet", fleet=FLEET) as server:
        assert status.main(["--url", server.url]) == 0
        assert "w0" in capsys.readouterr().out
        assert status.main(["--url", server.url, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["processes"][0]["tokens_per_s"] is None
        server.fleet["health"] = {"state": "warn", "text": "1 of 2 workers ready"}
        monkeypatch.setenv("PORT", str(server.port))
        assert status.main(["--once"]) == 0 and "1 of 2 workers ready" in capsys.readouterr().out
        server.fleet["health"] = {"state": "bad", "text": "no batcher is active"}
        assert status.main(["--once"]) == 1 and "no batcher is active" in capsys.readouterr().out


async def test_the_table_of_a_real_gateway_has_every_process(
    broker: Broker, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status, "REFRESH_S", 0.0)
    async with batching(broker.url), answering(broker.url, Answer([])) as (worker, _, client):
        assert await asyncio.to_thread(status.main, ["--url", str(client.base_url)]) == 0
    head, requests, health, *lines = capsys.readouterr().out.splitlines()
    assert (head, health) == ("smollm2  pool default", "1 worker ready") and "0 live" in requests
    assert {line.split()[0] for line in lines[2:]} == {"broker", "gateway", "batcher", "worker"}
    assert any(
        line.split()[:2] == ["worker", worker.incarnation.split("-")[0]] and "0/64" in line for line in lines
    )


@pytest.mark.parametrize("kind", ["vllm", "nobody"])
def test_another_server_or_none_is_one_error_line(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    if kind == "nobody":
        url = f"http://127.0.0.1:{free_port()}"
        assert status.main(["--url", url]) == 1
        words = f"tokenfleet: no server answers at {url}"
    else:
        with running(kind) as server:
            assert status.main(["--url", server.url]) == 1
        words = "tokenfleet: the server answers 404"
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith(words)
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "words"), [(["--url", "ftp://x"], "URL"), (["--wide"], "--wide"), (["extra"], "extra")]
)
def test_invalid_flags_are_refused(argv: list[str], words: str) -> None:
    with pytest.raises(SettingError, match=words):
        status.main(argv)
