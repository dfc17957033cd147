from typing import Any

import pytest

from common.settings.settings import SettingError, Settings
from deploy.launcher.fleet import new_fleet


def test_each_process_gets_its_own_ports() -> None:
    fleet = new_fleet(
        Settings(num_workers=2, num_gateways=2, num_jobs=1, metrics_port=9000, gateway_port=8000), None
    )
    ports = {process.name: process.environ["METRICS_PORT"] for process in fleet.all}
    assert ports == {"b0": "9000", "w0": "9001", "w1": "9002", "g0": "9003", "g1": "9004", "j0": "9005"}
    assert [process.environ["GATEWAY_PORT"] for process in fleet.gateways] == ["8000", "8001"]


def test_metrics_port_0_gives_no_process_a_metrics_port() -> None:
    assert {process.environ["METRICS_PORT"] for process in new_fleet(Settings(), None).all} == {"0"}


def test_ports_above_the_highest_are_refused() -> None:
    with pytest.raises(SettingError, match="METRICS_PORT: 65533 leaves no room for 4 ports up to 65535"):
        new_fleet(Settings(metrics_port=65_533), None)


@pytest.mark.parametrize(
    ("ports", "words"),
    [
        (
            {"port": 9001, "metrics_port": 9000},
            "METRICS_PORT: from 9000 on, 4 are needed, but 9001 is for PORT",
        ),
        (
            {"gateway_port": 8003, "metrics_port": 8000},
            "METRICS_PORT: from 8000 on, 4 are needed, but 8003 is for GATEWAY_PORT",
        ),
    ],
)
def test_overlapping_port_ranges_are_refused(ports: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingError, match=words):
        new_fleet(Settings(**ports), None)


def test_num_jobs_0_starts_no_job_worker() -> None:
    assert new_fleet(Settings(num_jobs=0), None).jobs == []
