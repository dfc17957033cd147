"""The server at METRICS_PORT writes nothing but lines of the log."""

import logging
import socket
import struct
import threading

import httpx
import pytest

from common.metrics.exposition import start_metrics_server
from common.settings.settings import Settings
from tests.support.machine.ports import free_port
from tests.support.waiting import wait_until_sync

RESET = struct.pack("ii", 1, 0)
"""SO_LINGER: closing resets the connection."""


class Readiness:
    """What `/health` asks: it waits until the client has gone, then says or fails."""

    def __init__(self, error: Exception | None) -> None:
        self.asked, self.may_answer, self.answered = (threading.Event() for _ in range(3))
        self.error = error

    def __call__(self) -> bool:
        self.asked.set()
        self.may_answer.wait(10)
        self.answered.set()
        if self.error is not None:
            raise self.error
        return True


@pytest.mark.parametrize(("error", "num_lines"), [(None, 0), (ValueError("odd"), 1)])
def test_a_failed_answer_is_a_line_of_the_log_and_a_client_that_left_is_none(
    error: Exception | None,
    num_lines: int,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    port, is_ready = free_port(), Readiness(error)
    start_metrics_server(Settings(hostname="127.0.0.1", metrics_port=port, redis_url="redis://x"), is_ready)
    with caplog.at_level(logging.DEBUG):
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(b"GET /health HTTP/1.1\r\n\r\n")
            assert is_ready.asked.wait(10)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        is_ready.may_answer.set()
        assert is_ready.answered.wait(10)
        wait_until_sync(lambda: not [one for one in threading.enumerate() if "process_request" in one.name])
    assert len([one for one in caplog.records if one.name == "common.metrics.exposition"]) == num_lines
    assert capfd.readouterr().err == ""
    assert httpx.get(f"http://127.0.0.1:{port}/nothing").status_code == 404
    assert httpx.get(f"http://127.0.0.1:{port}/livez").text == "live\n", "whatever is_ready says"
