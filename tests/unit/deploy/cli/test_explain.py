"""A life in words, and what is said when there is none."""

import http.server
import io
import json
import threading
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

import pytest
from rich.console import Console

from common.messages import events
from deploy.cli.explain import main, timeline

W0, W1 = "w0-9e47064c", "w1-bc844561"


def happening(
    at_ms: int, what: str, worker: str = "", attempt: int = 0, num_tokens: int = 0, why: str = ""
) -> dict[str, Any]:
    return {
        "at_ms": at_ms,
        "what": what,
        "worker": worker,
        "attempt": attempt,
        "num_tokens": num_tokens,
        "why": why,
    }


LIFE = [
    happening(10_000, "queued", num_tokens=5),
    happening(10_250, "placed", W0, 1),
    happening(10_300, "prefilled", W0, 1, 1),
    happening(11_000, "died", W0, 1, 37),
    happening(11_010, "placed", W1, 2, 37),
    happening(11_800, "prefilled", W1, 2, 38),
    happening(12_000, "ended", W1, 2, 50, "length"),
]


def lines(life: list[dict[str, Any]]) -> list[str]:
    """Without the time of day."""
    out = io.StringIO()
    Console(width=200, file=out).print(timeline(life))
    return [" ".join(line.split()[1:]) for line in out.getvalue().splitlines()]


def test_a_request_whose_worker_died() -> None:
    assert lines(LIFE) == [
        "+0.000 s queued with 5 prompt tokens",
        f"+0.250 s placed on {W0}, attempt 1 after 0.250 s in the queue",
        "+0.300 s first token, 0.300 s after it was queued",
        f"+1.000 s worker {W0} died at token 37",
        f"+1.010 s placed on {W1}, attempt 2",
        "+1.800 s token 38: resumed after 0.800 s",
        "+2.000 s ended with 50 tokens: max_new_tokens was reached (length)",
    ]


def test_a_timeline_without_its_first_events() -> None:
    life = [
        *LIFE[3:5],
        happening(11_100, "died", W1, 2, 37),
        happening(11_300, "taken_over", num_tokens=37),
        *LIFE[4:6],
    ]
    assert lines(life)[-1] == "+0.800 s token 38: resumed after 0.800 s"
    assert lines([happening(5, "interrupted", W0, 1, 3, "preempted"), happening(6, "ended", why="client")])[
        1
    ].endswith("ended with 0 tokens: its client left or cancelled it (client)")
    assert lines([happening(5, "prefilled", W0, 1, 1)]) == ["+0.000 s first token"]
    assert lines([happening(5, "something new")]) == ["+0.000 s something new"]


def test_every_end_is_explained_in_words() -> None:
    for why, (_, text) in events.ERRORS.items():
        assert lines([happening(5, "ended", num_tokens=1, why=why)]) == [
            f"+0.000 s ended with 1 token: {text} ({why})"
        ]


ODD = {
    "list": {"timelines": ["r"]},
    "empty": {"timelines": {"r": []}},
    "words": {"timelines": {"r": ["x"]}},
    "none": {"requests": 1},
}


OWN_ID = "de57631b1f34491f82900fbb5c26f525"


class Gateway(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        known = unquote(self.path) in ("/fleet/requests/a/b", f"/fleet/requests/{OWN_ID}")
        odd = ODD.get(unquote(self.path).removeprefix("/fleet/requests/"))
        body = (
            {"request_id": "a/b", "timelines": {"a/b.0": LIFE, "a/b.1": LIFE[:1]}}
            if known
            else odd or {"error": "Nothing is known of it"}
        )
        self.send_response(200 if known or odd else 404)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Gateway) as server:
        threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_every_choice_has_a_timeline(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["a/b", "--url", url]) == 0
    said = capsys.readouterr().out
    assert "request a/b.0" in said and "request a/b.1" in said and "died at token 37" in said


@pytest.mark.parametrize("prefix", ["", "cmpl-", "chatcmpl-", "resp_"])
def test_the_id_of_an_answer_names_its_request(prefix: str, url: str) -> None:
    assert main([prefix + OWN_ID, "--url", url]) == 0
    assert main([prefix + "mine", "--url", url]) == 1


def test_an_unknown_request_is_one_error_line(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nope", "--url", url]) == 1
    assert capsys.readouterr() == ("", "tokenfleet: the server answers 404: Nothing is known of it\n")
    assert main(["nope", "--url", "http://127.0.0.1:1"]) == 1
    assert "no server answers at http://127.0.0.1:1" in capsys.readouterr().err


@pytest.mark.parametrize("shape", ODD)
def test_an_unknown_response_is_one_error_line(
    shape: str, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([shape, "--url", url]) == 1
    out, error = capsys.readouterr()
    assert out == "" and error.startswith("tokenfleet: ") and error.count("\n") == 1
