"""GET /fleet/history: what each gateway keeps of the last five minutes."""

import pytest

from api.admin import history
from api.admin.history import FleetHistory, WorkerRates, sum_gaps
from api.admin.processes import ProcessList
from common.metrics import catalogue
from deploy.launcher.embedded_broker import Broker
from tests.support.fleet.gateways import answering
from tests.support.fleet.scripted_worker import Answer
from tests.support.tokenizer import ids
from tests.support.waiting import wait_until


async def test_the_history_has_the_tokens_and_gaps_of_a_stream(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "SAMPLE_S", 0.05)
    text = ids(" one two three four five six")
    async with answering(broker.url, Answer(text)) as (_, _, client):
        await client.post("/generate", json={"inputs": "Hi"})

        async def gaps() -> list[float]:
            samples = (await client.get("/fleet/history")).json()["samples"]
            return [sample["token_gap_ms"] for sample in samples if sample["token_gap_ms"] is not None]

        assert all(gap >= 0 for gap in await wait_until(gaps))
        answer = (await client.get("/fleet/history")).json()
        assert set(answer["samples"][-1]) == {
            *("time_s", "tokens_per_s", "token_gap_ms", "running", "waiting", "live", "blocks", "num_blocks")
        }
        times = [sample["time_s"] for sample in answer["samples"]]
        assert times == sorted(times) and len(times) <= 150
        assert "token_gap_ms" in (await client.get("/fleet")).json()


def worker(name: str, tokens: int, age_s: float = 0.0) -> dict[str, object]:
    return {
        "kind": "worker",
        "id": name,
        "state": "ready",
        "age_s": age_s,
        "tokens": tokens,
        "blocks": 3,
        "num_blocks": 9,
    }


def test_a_rate_is_between_two_heartbeats_and_ends_with_them() -> None:
    rates = WorkerRates()
    assert rates.total(0.0, [worker("w0", 100), worker("w1", 0)]) == 0
    assert rates.total(2.0, [worker("w0", 140), worker("w1", 10, 1.0)]) == 40 / 2 + 10 / 1
    assert rates.total(4.0, [worker("w0", 140), worker("w1", 10, 3.0)]) == 0
    assert rates.total(6.0, [worker("w2", 999)]) == 0, "one that came just now"


def test_gaps_are_those_since_the_last_sample() -> None:
    one = FleetHistory(None)  # type: ignore[arg-type]
    listed = ProcessList(5.0, 0, [worker("w0", 1)])
    name = catalogue.TOKEN_LATENCY.name
    totals = {
        f"{name}|standard|0.1": 3.0,
        f"{name}|batch|inf": 1.0,
        f"{name}|standard|sum": 0.5,
        "other|": 9.0,
    }
    assert sum_gaps(totals) == (4.0, 0.5)
    assert one.sample(listed, (4.0, 0.5)).token_gap_ms is None
    assert one.sample(listed, (6.0, 0.7)).token_gap_ms == 100.0
    assert one.sample(listed, (6.0, 0.7)).token_gap_ms is None
    assert one.sample(listed, (6.0, 0.7)).blocks == 3
