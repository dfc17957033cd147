"""Learning: costs from what a fleet counts."""

import pytest

from batcher.planning.learn import costs_of, learn
from common.settings.settings import SettingError
from tests.support.machine.ports import free_port
from tests.support.other_servers import FLEET, running

WORKER = {"block_size": 16, "num_blocks": 100, "max_batch_prefill_tokens": 2048, "max_rows": 64}


def totals(steps: int, tokens: int, prompt_tokens: int, requests: int = 0) -> dict[str, float]:
    return {
        "tgi_batch_forward_duration_count": steps,
        "tgi_batch_forward_duration_sum": (8 * steps + 0.5 * tokens + 0.25 * prompt_tokens) / 1e3,
        "tokenfleet_generated_tokens_total": tokens,
        "tokenfleet_prefilled_tokens_total": prompt_tokens,
        "tgi_request_queue_duration_count": requests,
        "tgi_request_queue_duration_sum": 0.001 * requests,
        "tokenfleet_request_prefill_seconds_count": requests,
        "tokenfleet_request_prefill_seconds_sum": 0.02 * requests,
        "tokenfleet_time_to_first_token_seconds_count": requests,
        "tokenfleet_time_to_first_token_seconds_sum": 0.025 * requests,
    }


def test_costs_follow_from_the_counters_of_a_fleet() -> None:
    read = [totals(0, 0, 0), totals(300, 300, 200, 4), totals(500, 2000, 700, 6), totals(800, 2600, 4000, 9)]
    costs = costs_of(read, WORKER, "here")
    assert (costs.step_ms, costs.row_ms, costs.prompt_token_ms) == pytest.approx((8, 0.5, 0.25))
    assert costs.hop_ms == pytest.approx(4.0)
    assert (costs.num_blocks, costs.max_batch_size, costs.num_steps) == (100, 64, 800)


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(SettingError, match="only 20 steps were computed meanwhile"):
        costs_of([totals(0, 0, 0), totals(20, 20, 20)], WORKER, "here")


def test_a_server_that_is_no_fleet_is_named() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(SettingError, match=f"--from: no fleet answers at {url}"):
        learn(url, 1.0, None)
    with (
        running("vllm") as server,
        pytest.raises(SettingError, match=r"--from: .* answers /fleet with status 404"),
    ):
        learn(server.url, 1.0, None)
    with running("tokenfleet", fleet=FLEET) as server, pytest.raises(SettingError, match="older version"):
        learn(server.url, 1.0, None)
