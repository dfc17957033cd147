"""`tokenfleet status` and `tokenfleet explain`: a fleet as a table, the life of a request in words."""

import asyncio
import copy
import http.server
import io
import json
import threading
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

import pytest
from rich.console import Console

from common.settings.settings import SettingError
from deploy.cli import admin, status
from deploy.launcher.embedded_broker import Broker
from tests.support.fleet.batchers import batching
from tests.support.fleet.gateways import answering
from tests.support.fleet.scripted_worker import Answer
from tests.support.machine.ports import free_port
from tests.support.other_servers import FLEET, running

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


def test_outside_a_terminal_one_table_is_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status, "REFRESH_S", 0.0)
    monkeypatch.setenv("API_KEY", "secret")
    with running(fleet=FLEET) as server:
        assert admin.main(["status", "--url", server.url]) == 0
        assert "w0" in capsys.readouterr().out
        assert admin.main(["status", "--url", server.url, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["processes"][0]["tokens_per_s"] is None
        server.fleet = FLEET | {"health": {"state": "warn", "text": "1 of 2 workers ready"}}
        monkeypatch.setenv("PORT", str(server.port))
        assert admin.main(["status", "--once"]) == 0 and "1 of 2 workers ready" in capsys.readouterr().out
        server.fleet = FLEET | {"health": {"state": "bad", "text": "no batcher is active"}}
        assert admin.main(["status", "--once"]) == 1 and "no batcher is active" in capsys.readouterr().out


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


def test_another_server_or_none_is_one_error_line(capsys: pytest.CaptureFixture[str]) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with running() as server:
        assert [admin.main(["status", "--url", one]) for one in (url, server.url)] == [1, 1]
    out, error = capsys.readouterr()
    assert out == ""
    nobody, other = error.splitlines()
    assert nobody.startswith(f"tokenfleet: no server answers at {url}")
    assert other.startswith("tokenfleet: the server answers 404")


@pytest.mark.parametrize(
    ("argv", "words"), [(["--url", "ftp://x"], "URL"), (["--wide"], "--wide"), (["extra"], "extra")]
)
def test_invalid_flags_are_refused(argv: list[str], words: str) -> None:
    with pytest.raises(SettingError, match=words):
        admin.main(["status", *argv])


# --- explain ------------------------------------------------------------------------------------------------

W0, W1 = "w0-9e47064c", "w1-bc844561"


def happening(
    at_ms: int, what: str, worker: str = "", attempt: int = 0, num_tokens: int = 0, why: str = ""
) -> dict[str, Any]:
    return {
        "at_ms": at_ms,
        "what": what,
        "worker": worker,
        "attempt": attempt,
        "num_tokens": num_tokens,
        "why": why,
    }


LIFE = [
    happening(10_000, "queued", num_tokens=5),
    happening(10_250, "placed", W0, 1),
    happening(10_300, "prefilled", W0, 1, 1),
    happening(11_000, "died", W0, 1, 37),
    happening(11_010, "placed", W1, 2, 37),
    happening(11_800, "prefilled", W1, 2, 38),
    happening(12_000, "ended", W1, 2, 50, "timeout"),
]


OWN_ID = "de57631b1f34491f82900fbb5c26f525"


class Gateway(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        known = unquote(self.path) in ("/fleet/requests/a/b", f"/fleet/requests/{OWN_ID}")
        body = (
            {"request_id": "a/b", "timelines": {"a/b.0": LIFE, "a/b.1": LIFE[:1]}}
            if known
            else {"error": "Nothing is known of it"}
        )
        self.send_response(200 if known else 404)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Gateway) as server:
        threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_every_choice_has_a_timeline(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert admin.main(["explain", "a/b", "--url", url]) == 0
    title, head, *lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert (title, head) == (
        ["request", "a/b.0"],
        "time after s what worker attempt tokens cached why".split(),
    )
    assert lines[len(LIFE)] == ["request", "a/b.1"]
    told = [" ".join(line[2:]) for line in lines[: len(LIFE)]]
    assert told == [
        "0.000 queued 5",
        f"0.250 placed {W0} 1 0",
        f"0.300 prefilled {W0} 1 1",
        f"1.000 died {W0} 1 37",
        f"1.010 placed {W1} 2 37",
        f"1.800 prefilled {W1} 2 38",
        f"2.000 ended {W1} 2 50 timeout: the request was not finished before its deadline",
    ]


@pytest.mark.parametrize("prefix", ["", "cmpl-", "chatcmpl-", "resp_"])
def test_the_id_of_an_answer_names_its_request(prefix: str, url: str) -> None:
    assert admin.main(["explain", prefix + OWN_ID, "--url", url]) == 0
    assert admin.main(["explain", prefix + "mine", "--url", url]) == 1


def test_an_unknown_request_is_one_error_line(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert admin.main(["explain", "nope", "--url", url]) == 1
    assert capsys.readouterr() == ("", "tokenfleet: the server answers 404: Nothing is known of it\n")
    assert admin.main(["explain", "nope", "--url", "http://127.0.0.1:1"]) == 1
    assert "no server answers at http://127.0.0.1:1" in capsys.readouterr().err
