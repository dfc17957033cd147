"""`tokenfleet chaos`: whole runs against servers that lose, repeat and change tokens, and break off."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from common.settings.settings import SettingError
from deploy.chaos import run
from deploy.chaos.command import main
from tests.support.chaos.bad_server import BadServer, Fault, bad_server
from tests.support.machine.ports import free_port
from tests.support.other_servers import running

TOKENS = 20
QUICK = ["--duration", "1", "--streams", "2", "--prompts", "2", "--max-tokens", str(TOKENS)]


@pytest.fixture(autouse=True)
def short_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "FAILED_PAUSE_S", 0.05)


@pytest.fixture
def server() -> Iterator[BadServer]:
    with bad_server() as server:
        yield server


def measure(server: BadServer, path: Path, *flags: str, fault: Fault | None = None) -> dict[str, Any]:
    """Run the command; the fault begins with the first strike. Returns the figures and the exit code."""
    file = path / "figures.json"
    if fault is not None:
        begin_with_strikes(server, fault)
    code = main(["--against", server.url, *QUICK, "--json", str(file), *flags])
    found: dict[str, Any] = json.loads(file.read_text())
    figures: dict[str, Any] = found["figures"]
    return figures | {
        "code": code,
        "strikes_done": found["strikes"],
        "wrong": found["wrong_answers"],
    }


def begin_with_strikes(server: BadServer, fault: Fault) -> None:
    """Leave the undisturbed answers as they are: three rounds of two prompts, after a first request."""

    def disturb(tokens: list[str]) -> Sequence[str | None]:
        return fault(tokens) if server.num_requests > 1 + run.TRUTH_ROUNDS * 2 else tokens

    server.fault = disturb


def test_a_right_server_has_no_error(server: BadServer, tmp_path: Path) -> None:
    found = measure(server, tmp_path, "--fail-on", "lost,repeated,changed,failed")
    assert found["code"] == 0
    assert found["whole"] == found["requests"] == found["compared"] > 0
    assert found["num_stable"] == 2


@pytest.mark.parametrize(
    ("name", "count", "fault"),
    [
        ("lost", 2, lambda tokens: [*tokens[:6], *tokens[8:]]),
        ("repeated", 3, lambda tokens: [*tokens[:9], *tokens[6:]]),
        ("changed", 1, lambda tokens: [*tokens[:4], " foo", *tokens[5:]]),
    ],
)
def test_errors_of_tokens_are_counted_in_each_answer(
    server: BadServer, tmp_path: Path, name: str, count: int, fault: Fault
) -> None:
    found = measure(server, tmp_path, "--fail-on", name, fault=fault)
    wrong = {kind: found[kind] for kind in ("lost", "repeated", "changed", "undelivered", "failed")}
    assert wrong == dict.fromkeys(wrong, 0) | {name: count * found["requests"]}
    assert found["code"] == 1
    assert found["wrong"][0][name] == count


@pytest.mark.slow
def test_an_answer_that_breaks_off_is_a_failed_request_and_is_not_sent_again(
    server: BadServer, tmp_path: Path
) -> None:
    found = measure(server, tmp_path, fault=lambda tokens: [*tokens[:5], None])
    assert found["failed"] == found["broken"] == found["requests"]
    assert found["undelivered"] == (TOKENS - 5) * found["failed"]
    assert found["lost"] == 0
    assert server.num_requests == found["requests"] + 1 + run.TRUTH_ROUNDS * 2


def test_a_refused_request_has_failed_and_delivers_nothing(server: BadServer, tmp_path: Path) -> None:
    def refuse(tokens: list[str]) -> list[str]:
        server.refusal = 503
        return tokens

    found = measure(server, tmp_path, fault=refuse)
    assert found["failures"] == {"status 503: not now": found["failed"]}
    assert found["broken"] == found["undelivered"] == 0


@pytest.mark.slow
def test_a_client_goes_on_where_a_stream_broke_off_if_the_server_allows_it(tmp_path: Path) -> None:
    with bad_server(resumes=True) as server:
        found = measure(server, tmp_path, "--drop", "1", "--fail-on", "lost,repeated,changed,failed")
    assert found["code"] == 0
    assert found["cuts"] == found["returns"] == found["whole"] == found["requests"] == len(server.returns)
    assert all(0 < seen < TOKENS for seen in server.returns)


def test_an_answer_that_cannot_go_on_after_this_client_cut_it_is_no_fault_of_the_server(
    server: BadServer, tmp_path: Path
) -> None:
    found = measure(server, tmp_path, "--drop", "1", "--fail-on", "lost,failed")
    assert found["code"] == 0
    assert found["given_up"] == found["requests"] > 0
    assert found["undelivered"] == 0


@pytest.mark.slow
def test_answers_that_differ_without_strikes_are_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with bad_server(alternates=True) as server:
        found = measure(server, tmp_path, "--fail-on", "lost")
    assert found["num_stable"] == found["compared"] == 0
    assert "2 of 2 prompts had different answers" in capsys.readouterr().out
    assert found["code"] == 1, "nothing was compared, so nothing is known to be right"


@pytest.mark.slow
def test_chat_is_asked_where_there_is_no_other_route(tmp_path: Path) -> None:
    with bad_server(routes=["/v1/chat/completions"]) as server:
        assert measure(server, tmp_path)["whole"] > 0


@pytest.mark.slow
def test_commands_strike_in_turns(server: BadServer, tmp_path: Path) -> None:
    log = tmp_path / "log"
    flags = [
        *("--kill", f"echo kill >> {log}", "--restart", f"echo restart >> {log}; exit 3"),
        *("--pause", f"echo pause >> {log}", "--unpause", f"echo unpause >> {log}"),
    ]
    found = measure(server, tmp_path, *flags, "--pause-s", "0.05", "--every", "0.4")
    assert [strike["kind"] for strike in found["strikes_done"]] == ["kill", "pause"]
    assert sorted(log.read_text().split()) == ["kill", "pause", "restart", "unpause"]
    assert found["strikes_done"][0]["problem"] == "restart ended with 3: no output"
    assert found["missed"] == 1


def test_the_page_shows_every_stream_and_needs_no_network(server: BadServer, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    found = measure(server, tmp_path, "--report", str(page), fault=lambda tokens: [*tokens[:5], None])
    text = page.read_text()
    assert f"of {found['requests']} requests failed" in text
    assert text.count('class="row"') == 2
    assert text.count('class="cut"') == found["failed"]
    assert not re.search(r"(src|href)=|url\(|@import", text)


@pytest.mark.slow
def test_a_kill_by_name_hits_neither_the_command_nor_its_shell(server: BadServer, tmp_path: Path) -> None:
    """`pkill -f` looks at the arguments of every process, ours included."""
    name = f"chaos-victim-{os.getpid()}"
    victim = subprocess.Popen([sys.executable, "-c", f"input()  # {name}"], stdin=subprocess.PIPE)
    words = ["chaos", "--against", server.url, *QUICK, "--every", "1", "--kill", f"pkill -9 -f {name}"]
    file = tmp_path / "figures.json"
    command = [sys.executable, "-m", "deploy.cli", *words, "--json", str(file)]
    try:
        assert subprocess.run(command, timeout=60, check=False).returncode == 0
    finally:
        victim.kill()
        victim.wait()
    assert [strike["problem"] for strike in json.loads(file.read_text())["strikes"]] == [""]


def test_a_server_that_is_not_openai_compatible_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with running("nothing") as other:
        assert main(["--against", other.url, *QUICK]) == 1
    assert "it has neither /fleet nor /info nor /v1/models" in capsys.readouterr().err
    with bad_server(routes=[]) as server:
        assert main(["--against", server.url, *QUICK]) == 1
    assert "is not OpenAI-compatible: it has neither /v1/completions" in capsys.readouterr().err
    assert main(["--against", f"http://127.0.0.1:{free_port()}", *QUICK]) == 1
    assert "no server answers" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        (["--drop", "2"], "--drop"),
        (["--duration", "inf"], "--duration"),
        (["--restart", "true"], "--restart"),
        (["--pause", "true"], "--pause"),
        (["--fail-on", "lost,found"], "--fail-on"),
        (["--json", "/nowhere/x"], "--json"),
    ],
)
def test_a_wrong_flag_is_named(flags: list[str], name: str) -> None:
    with pytest.raises(SettingError) as error:
        main(["--against", "http://127.0.0.1:1", *flags])
    assert error.value.name == name
