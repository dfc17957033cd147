"""`tokenfleet adapters`: what it asks a gateway for, and what it prints."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from common.settings.settings import SettingError
from deploy.cli import admin

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
    def run(*words: str, status: int = 200, reply: Any = "Success") -> tuple[int, list[tuple[str, Any]]]:
        asked: list[tuple[str, Any]] = []

        def answer(request: httpx.Request) -> httpx.Response:
            body = json.loads(request.content) if request.content else None
            asked.append((request.url.path, body))
            return httpx.Response(status, **({"text": reply} if isinstance(reply, str) else {"json": reply}))

        transport = httpx.MockTransport(answer)
        monkeypatch.setattr(
            admin, "new_client", lambda *_: httpx.Client(base_url="http://fleet", transport=transport)
        )
        word, *rest = words
        return admin.main(["adapters", word, "--url", "http://fleet", *rest]), asked

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
    reply = {"error": {"message": "There is no adapter 'x'"}}
    assert ask("unload", "x", status=404, reply=reply)[0] == 1
    assert capsys.readouterr().err == "tokenfleet: the server answers 404: There is no adapter 'x'\n"
    with pytest.raises(SettingError, match=r"^ADAPTER: 'a b=c' is not an adapter"):
        ask("load", "a b=c")
