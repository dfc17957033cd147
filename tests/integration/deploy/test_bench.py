"""`tokenfleet bench`: its arithmetic, and whole runs against servers that speak as others do."""

import json
from pathlib import Path

import httpx
import pytest

from common.settings.settings import SettingError
from deploy.cli import bench
from deploy.cli.bench import (
    COMPLETIONS,
    GENERATE,
    Round,
    Server,
    TimedAnswer,
    body,
    figures,
    identify,
    main,
    quantile,
    route,
    send,
)
from deploy.cli.client import ServerError
from deploy.launcher.embedded_broker import Broker
from tests.support.fleet.gateways import answering
from tests.support.fleet.scripted_worker import EOS
from tests.support.fleet.scripted_worker import Answer as Answered
from tests.support.machine.ports import free_port
from tests.support.other_servers import FLEET, running
from tests.support.tokenizer import ids

KINDS = {
    "tokenfleet": "Tokenfleet",
    "tgi": "TGI",
    "vllm": "vLLM",
    "llama.cpp": "llama.cpp",
    "openai": "OpenAI API",
}
QUICK = ["--duration", "1", "--concurrency", "1,2", "--max-tokens", "4"]


@pytest.fixture(autouse=True)
def short_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "SETTLE_S", 0.01)
    monkeypatch.setattr(bench, "MIN_ROUND_S", 0.1)


def test_quantiles_count_requests_that_still_wait() -> None:
    assert [quantile([4, 1, 3, 2], [], q) for q in (0.01, 0.5, 0.51, 1.0)] == [1, 2, 3, 4], "nearest rank"
    assert quantile([1, 2, 3, 4], [9, 9, 9, 9], 0.5) == 4
    assert quantile([1, 2, 3, 4], [9, 9, 9, 9, 9], 0.5) is None
    assert quantile([1, 3], [2, 2], 0.5) == 3, "1 ends a quarter of all waits, 3 the rest"
    assert quantile([], [1.0], 0.5) is None
    assert quantile([], [], 0.5) is None


def test_figures_of_a_round_count_unfinished_and_failed_answers() -> None:
    whole = TimedAnswer(10.0, [10.5, 10.6, 10.9], 11.0, num_tokens=6)
    short = TimedAnswer(11.0, [11.2, 11.4])
    waiting = TimedAnswer(11.5)
    failed = TimedAnswer(10.0, error="too many")
    it = figures([Round(10.0, 12.0, [whole, short, waiting, failed])])
    assert it.tokens_per_frame == 2.0
    assert it.tokens_per_s == 5.0, "five frames of two tokens in two seconds"
    assert (it.num_answers, it.num_errors, it.error) == (1, 1, "too many")
    assert it.first_p50_s == pytest.approx(0.5), "of 0.2, 0.5 and one that had waited for 0.5"
    assert it.first_p99_s is None
    assert it.gap_p50_s == pytest.approx(0.2), "of 0.1, 0.3, 0.2 and one that had waited for 0.6"


@pytest.mark.parametrize("kind", KINDS)
async def test_servers_are_identified_by_their_routes(kind: str) -> None:
    with running(kind, fleet=FLEET) as server:
        async with httpx.AsyncClient(base_url=server.url) as client:
            found = await identify(client)
    assert (found.kind, found.url) == (KINDS[kind], server.url)
    assert found.model == "tiny"


async def test_an_unknown_server_is_refused() -> None:
    with running("nothing") as server:
        async with httpx.AsyncClient(base_url=server.url) as client:
            with pytest.raises(ServerError, match="none of the servers known here"):
                await identify(client)


def test_the_request_body_of_each_route() -> None:
    ours, vllm, tgi, other = (
        Server("u", kind, "", "m") for kind in ("Tokenfleet", "vLLM", "TGI", "OpenAI API")
    )
    assert route([ours, vllm]) == COMPLETIONS
    assert route([ours, tgi]) == GENERATE
    assert json.loads(body(vllm, COMPLETIONS, "Hi", 4))["ignore_eos"] is True
    assert "ignore_eos" not in json.loads(body(other, COMPLETIONS, "Hi", 4))
    assert json.loads(body(ours, GENERATE, "Hi", 4))["parameters"]["ignore_eos"] is True
    assert "ignore_eos" not in json.loads(body(tgi, GENERATE, "Hi", 4))["parameters"]


@pytest.mark.parametrize("kind", KINDS)
async def test_every_token_is_counted_once(kind: str) -> None:
    with running(kind, fleet=FLEET) as server:
        async with httpx.AsyncClient(base_url=server.url) as client:
            found = await identify(client)
            path, answer = route([found]), TimedAnswer(0.0)
            await send(client, path, body(found, path, "one two three", 9), answer)
    assert len(answer.times_s) == 9
    assert answer.ended_s
    assert answer.num_tokens == (None if kind == "tgi" else 9)
    assert answer.prompt_tokens == (None if kind == "tgi" else 3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["vllm", "tgi"])
def test_a_run_prints_a_table_and_writes_the_figures(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "MIN_ROUND_S", 0.3)
    monkeypatch.setenv("API_KEY", "ours")
    monkeypatch.setenv("AGAINST_API_KEY", "theirs")
    told = tmp_path / "figures.json"
    with running("tokenfleet", fleet=FLEET, pause_s=0.002) as ours, running(kind, pause_s=0.002) as other:
        more = ["--concurrency", "2", "--json", str(told)]
        assert main(["--url", ours.url, "--against", other.url, *QUICK, *more]) == 0
    out, error = capsys.readouterr()
    assert error == ""
    assert f"{KINDS[kind]}" in out
    assert "ratio" in out
    assert [word in out for word in ("tokens/s", "first token ms", "next token ms", "×")] == [True] * 4
    assert (set(ours.keys), set(other.keys)) == ({"Bearer ours"}, {"Bearer theirs"})
    result = json.loads(told.read_text())
    assert {(row["users"], row["server"]) for row in result["figures"]} == {(2, 0), (2, 1)}
    assert all(row["tokens_per_s"] > 0 and row["num_errors"] == 0 for row in result["figures"])


@pytest.mark.parametrize("path", [COMPLETIONS, GENERATE])
async def test_a_real_gateway_is_identified_and_goes_on_after_the_end_of_sequence(
    path: str, broker: Broker
) -> None:
    """Both sides of the contract are real; only the worker is scripted."""
    async with answering(
        broker.url, Answered([*ids(" four")[:1], EOS, *ids(" six seven eight")], ends=False)
    ) as (_, _, client):
        found, answer = await identify(client), TimedAnswer(0.0)
        assert (found.kind, found.model) == ("Tokenfleet", "smollm2")
        await send(client, path, body(found, path, "one two three", 5), answer)
    assert len(answer.times_s) == 5, "the end-of-sequence token is one of them"
    assert (answer.num_tokens, answer.prompt_tokens) == (5, 3)


@pytest.mark.parametrize(
    "words", ["answers no request: the server answers 400: no such field", "no server answers at"]
)
def test_a_failing_server_is_named_with_the_cause(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with (
        running("tokenfleet", fleet=FLEET) as ours,
        running("vllm", refusal=(400, {"error": {"message": "no such field"}})) as other,
    ):
        url = other.url if "400" in words else f"http://127.0.0.1:{free_port()}"
        assert main(["--url", ours.url, "--against", url, *QUICK]) == 1
    out, error = capsys.readouterr()
    assert out == ""
    assert words in error
    assert url in error
    assert error.count("\n") == 1


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
        main(argv)
    assert words in str(error.value)
