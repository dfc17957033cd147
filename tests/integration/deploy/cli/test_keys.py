"""`tokenfleet keys`: a key is made, listed, rotated and revoked, and printed once."""

import re

import pytest

from common.settings.settings import SettingError
from deploy.cli import admin
from deploy.launcher.embedded_broker import Broker


@pytest.fixture(autouse=True)
def broker_url(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_URL", broker.url)


def said(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[str, str]:
    assert admin.main(["keys", *words]) == 0
    captured = capsys.readouterr()
    return captured.out, captured.err


def test_a_key_lives_and_ends(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "list")[0] == "there are no API keys\n"
    words = ("--tenant", "acme", "--name", "reports", "--requests-per-minute", "60", "--expires", "30d")
    text, about = said(capsys, "add", *words, "--models", "a", "b")
    key_id = about.splitlines()[-1].split()[0]
    assert re.fullmatch(r"tf-[\w-]{43}\n", text) and "acme" in about
    table = said(capsys, "list")[0]
    assert all(word in table for word in (key_id, "reports", "acme", "active", "60 requests/min", "a, b"))
    assert text.strip() not in table
    other, _ = said(capsys, "rotate", key_id)
    assert other != text
    assert "is revoked since" in said(capsys, "revoke", key_id)[0]
    assert "revoked" in said(capsys, "list")[0]
    assert admin.main(["keys", "rotate", key_id]) == 1
    assert admin.main(["keys", "revoke", "nobody"]) == 1
    assert "there is no key 'nobody'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--tenant", "a b"), "`tenant`"),
        (("--class", "urgent"), "`service_class`"),
        (("--weight", "0"), "`weight`"),
        (("--max-concurrent", "-1"), "`max_concurrent`"),
        (("--expires", "soon"), "`expires_at`"),
    ],
)
def test_what_is_wrong_is_refused_by_name(words: tuple[str, ...], named: str) -> None:
    with pytest.raises(SettingError) as error:
        admin.main(["keys", "add", *words])
    assert named in str(error.value)
