"""`tokenfleet bench`: its arithmetic, and runs against servers that speak as others do."""

import json
from pathlib import Path

import httpx
import pytest

from common.settings.settings import SettingError
from deploy.cli import admin
from deploy.cli.bench import Endpoint, TimedAnswer, figures_of, percentile
from deploy.launcher.embedded_broker import Broker
from tests.support.fleet.gateways import answering
from tests.support.fleet.scripted_worker import EOS, Answer
from tests.support.machine.ports import free_port
from tests.support.other_servers import running
from tests.support.tokenizer import ids

QUICK = ["--duration", "1", "--concurrency", "2", "--max-tokens", "4"]


def test_figures_count_frames_in_time_and_the_tokens_that_the_server_counts() -> None:
    assert [percentile([4, 1, 3, 2], part) for part in (1, 50, 51, 100)] == [1, 2, 3, 4], "nearest rank"
    whole = TimedAnswer(10.0, [10.5, 10.6, 10.9], 6, 9)
    late = TimedAnswer(11.0, [11.2, 12.4], 4, 9)
    failed = TimedAnswer(10.0, [10.1], error="too many")
    it = figures_of(3, "u", [whole, late, failed], begun_s=10.0, seconds=2.0)
    assert it.tokens_per_s == 4.0, "four frames of two tokens in two seconds"
    assert (it.num_answers, it.num_errors, it.error, it.prompt_tokens) == (2, 1, "too many", 9)
    assert it[3:7] == pytest.approx((0.2, 0.5, 0.3, 1.2)), "of first and next tokens, half and 99%"
    assert figures_of(3, "u", [failed], 10.0, 2.0).first_p50_s is None


def test_a_run_beside_another_server_prints_ratios_and_writes_the_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("API_KEY", "ours")
    monkeypatch.setenv("AGAINST_API_KEY", "theirs")
    told = tmp_path / "figures.json"
    with running(pause_s=0.002) as ours, running(pause_s=0.002) as other:
        assert (
            admin.main(["bench", "--url", ours.url, "--against", other.url, *QUICK, "--json", str(told)]) == 0
        )
    out = capsys.readouterr().out
    assert all(word in out for word in ("tokens/s", "first token ms", "next p99", "ours / theirs", "×"))
    assert (set(ours.keys), set(other.keys)) == ({"Bearer ours"}, {"Bearer theirs"})
    rows = json.loads(told.read_text())["figures"]
    assert [(row["users"], row["url"]) for row in rows] == [(2, ours.url), (2, other.url)]
    assert all(row["tokens_per_s"] > 0 and row["num_errors"] == 0 for row in rows)
    assert all((row["prompt_tokens"], row["answer_tokens"]) == (128, 4) for row in rows)


async def test_an_answer_of_a_real_gateway_goes_on_after_the_end_of_sequence(broker: Broker) -> None:
    """Both sides of the contract are real; only the worker is scripted."""
    scripted = Answer([*ids(" four")[:1], EOS, *ids(" six seven eight")], ends=False)
    async with answering(broker.url, scripted) as (_, _, client):
        answer = TimedAnswer()
        async with httpx.AsyncClient(base_url=client.base_url) as own:
            await Endpoint(own, "smollm2").ask("one two three", 5, answer)
    assert len(answer.times_s) == 5, "the end-of-sequence token is one of them"
    assert (answer.num_tokens, answer.prompt_tokens) == (5, 3)


@pytest.mark.parametrize(
    "words", ["answers no request: the server answers 400: no such field", "no server answers at"]
)
def test_a_failing_server_is_named_with_the_cause(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with running() as ours, running(refusal=(400, {"error": {"message": "no such field"}})) as other:
        url = other.url if "400" in words else f"http://127.0.0.1:{free_port()}"
        assert admin.main(["bench", "--url", ours.url, "--against", url, *QUICK]) == 1
    out, error = capsys.readouterr()
    assert out == ""
    assert words in error and url in error


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--concurrency", "1;8"], "--concurrency: '1;8' is not a list of numbers"),
        (["--duration", "nan"], "--duration: nan"),
        (["--against", "nowhere:x"], "URL: 'nowhere:x'"),
        (["--json", "/no/such/place.json"], "--json: /no/such/place.json cannot be written: No such file"),
    ],
)
def test_invalid_flags_are_refused(argv: list[str], words: str) -> None:
    with pytest.raises(SettingError) as error:
        admin.main(["bench", "--url", "http://127.0.0.1:9", *argv])
    assert words in str(error.value)
