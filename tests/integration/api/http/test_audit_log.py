"""The audit log: a line for each request, refused ones too, and nothing of what it said."""

import json
from pathlib import Path
from typing import Any

import pytest

from api.http.audit_log import AuditLog
from common.settings.settings import SettingError, Settings
from deploy.launcher.embedded_broker import Broker
from tests.support.fleet.gateways import answering
from tests.support.fleet.scripted_worker import Answer
from tests.support.tokenizer import ids
from tests.support.waiting import wait_until

SECRET = "The sky over Zanzibar"


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


async def test_requests_and_refusals_have_a_line_whatever_the_rate_of_the_access_log(
    broker: Broker, tmp_path: Path
) -> None:
    written = tmp_path / "audit.g0.jsonl"
    settings: dict[str, Any] = {
        "audit_log": str(tmp_path / "audit.jsonl"),
        "access_log_rate": 0,
        "demo": False,
    }
    async with answering(broker.url, lambda _: Answer(ids(" the sea")), **settings) as (_, _, client):
        body = {"inputs": SECRET, "parameters": {"max_new_tokens": 2}}
        answer = await client.post("/generate", json=body, headers={"x-tenant": "acme"})
        await client.post("/generate", json={"inputs": SECRET, "parameters": {"top_p": 7}})
        await client.post("/fleet/processes/w0/kill")
        await client.get("/health")
        await wait_until(lambda: len(lines(written)) == 3)
    served, refused, killed = lines(written)
    assert served["request_id"] == answer.headers["x-request-id"]
    assert (served["tenant"], served["route"], served["status"]) == ("acme", "/generate", 200)
    assert (served["completion_tokens"], served["reason"], served["client"]) == (2, "length", "127.0.0.1")
    assert served["begun"] <= served["first_token"] <= served["ended"]
    assert (refused["status"], refused["reason"]) == (422, "validation") and "first_token" not in refused
    assert (killed["path"], killed["status"]) == ("/fleet/processes/w0/kill", 403)
    assert "Zanzibar" not in written.read_text() and "sea" not in written.read_text()


def write(audit: AuditLog | None, number: int) -> None:
    assert audit is not None
    audit.write(0.0, {"method": "GET", "route": "/usage", "status": number}, "/usage")


def test_a_file_that_is_full_is_kept_beside_the_next(tmp_path: Path) -> None:
    audit = AuditLog.open(
        Settings(audit_log=str(tmp_path / "a.log"), audit_log_bytes=400, audit_log_files=2), "g1-abc"
    )
    for number in range(20):
        write(audit, number)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.g1.log", "a.g1.log.1", "a.g1.log.2"]
    assert lines(tmp_path / "a.g1.log")[-1]["status"] == 19


def test_a_file_that_was_moved_away_is_begun_anew(tmp_path: Path) -> None:
    audit = AuditLog.open(Settings(audit_log=str(tmp_path / "a.log"), audit_log_bytes=0), "g0-abc")
    write(audit, 1)
    (tmp_path / "a.g0.log").rename(tmp_path / "moved")
    write(audit, 2)
    assert [lines(tmp_path / name)[0]["status"] for name in ("moved", "a.g0.log")] == [1, 2]


def test_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    write(AuditLog.open(Settings(audit_log="-"), "g0-abc"), 200)
    assert json.loads(capsys.readouterr().out)["status"] == 200


def test_a_file_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"AUDIT_LOG: .*No such file"):
        AuditLog.open(Settings(audit_log=str(tmp_path / "none" / "a.log")), "g0-abc")
