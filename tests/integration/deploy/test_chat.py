"""`tokenfleet chat` as a user sees it, through a pipe and in a terminal of its own."""

import asyncio
import codecs
import contextlib
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

import httpx
import pytest

from deploy.cli.chat import Conversation
from deploy.cli.client import SseDecoder, error_message, parse_url
from deploy.launcher.embedded_broker import Broker
from tests.support.fleet.batchers import batching
from tests.support.fleet.gateways import GatewayProcesses, answering
from tests.support.fleet.scripted_worker import Answer, working
from tests.support.forks.command import tokenfleet
from tests.support.machine.ports import free_port
from tests.support.other_servers import WORDS, Server, running
from tests.support.tokenizer import TOKENIZER, ids
from tests.support.waiting import wait_until, wait_until_sync

COMMAND = [
    sys.executable,
    "-P",
    "-c",
    "import sys; from deploy.cli import admin; sys.exit(admin.main(['chat', *sys.argv[1:]]))",
]
ENVIRON = {name: value for name, value in os.environ.items() if name not in ("API_KEY", "PORT")} | {
    "TERM": "xterm"
}
TEXT = " ".join(WORDS)


def piped(server_url: str, text: bytes, *flags: str, **variables: str) -> subprocess.CompletedProcess[bytes]:
    return tokenfleet("chat", "--url", server_url, *flags, environ=ENVIRON | variables, content=text)


@dataclass
class Terminal:
    """A program in a terminal; `seen` is its output that no call has waited for yet."""

    process: subprocess.Popen[bytes]
    screen: int
    seen: str = ""
    decoder: codecs.IncrementalDecoder = field(default_factory=codecs.getincrementaldecoder("utf-8"))

    def waits_for(self, text: str) -> None:
        """Wait until the program has written `text`; the next call looks only at what follows it."""

        def found() -> bool:
            with contextlib.suppress(BlockingIOError, OSError):
                self.seen += self.decoder.decode(os.read(self.screen, 65_536))
            return text in self.seen

        wait_until_sync(found)
        self.seen = self.seen.split(text, 1)[1]

    def types(self, text: str) -> None:
        os.write(self.screen, text.encode())


def heed_ctrl_c() -> None:
    """Restore Ctrl-C, as in a terminal: a program that a script starts in the background inherits that SIGINT
    is ignored.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextlib.contextmanager
def terminal(server: Server, *flags: str) -> Iterator[Terminal]:
    screen, theirs = pty.openpty()
    os.set_blocking(screen, False)
    command = [*COMMAND, "--url", server.url, *flags]
    process = subprocess.Popen(
        command,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=ENVIRON,
        start_new_session=True,
        preexec_fn=heed_ctrl_c,
    )
    os.close(theirs)
    try:
        person = Terminal(process, screen)
        person.waits_for("Ctrl-D ends")
        person.waits_for("› ")
        yield person
    finally:
        process.kill()
        process.wait()
        os.close(screen)


def test_stdout_of_a_pipe_is_the_answer_only() -> None:
    flags = ["--system", "Be brief.", "--temperature", "0", "--max-tokens", str(len(WORDS)), "--seed", "7"]
    with running() as server:
        done = piped(server.url, b"Why is\nthe sky blue?\n", *flags, API_KEY="sk-1")
        assert (done.stdout.decode(), done.stderr) == (TEXT + " \n", b"")
        assert done.returncode == 0
        [body] = server.bodies
        assert body["messages"] == [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Why is\nthe sky blue?"},
        ]
        asked = {name: body[name] for name in ("model", "temperature", "max_tokens", "seed", "stream")}
        assert asked == {
            "model": "tiny",
            "temperature": 0,
            "max_tokens": len(WORDS),
            "seed": 7,
            "stream": True,
        }
        assert server.keys == ["Bearer sk-1"]


def test_the_servers_own_message_is_shown() -> None:
    with running(refusal=(422, {"error": "temperature: 9 is too much"})) as server:
        done = piped(server.url, b"Hi")
    assert (done.stdout, done.returncode) == (b"", 1)
    assert done.stderr == b"tokenfleet: the server answers 422: temperature: 9 is too much\n"


def test_an_error_after_the_first_token_is_shown() -> None:
    with running(late_error={"error": {"message": "the worker is gone"}}) as server:
        done = piped(server.url, b"Hi")
    assert done.stdout.startswith(WORDS[0].encode())
    assert done.stderr == b"tokenfleet: the server ends the answer: the worker is gone\n"
    assert done.returncode == 1


def test_a_key_that_is_not_ascii_is_refused() -> None:
    with running() as server:
        done = piped(server.url, b"Hi", API_KEY="\u043a\u043b\u044e\u0447")
    assert (
        done.stderr
        == b"tokenfleet: API_KEY has characters that are not ASCII, which no HTTP header can carry\n"
    )


def test_an_unreachable_server_is_one_error_line() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    done = piped(url, b"Hi")
    assert done.returncode == 1
    assert done.stderr.decode().startswith(f"tokenfleet: no server answers at {url}")
    assert done.stderr.count(b"\n") == 1


def test_a_conversation_in_a_terminal() -> None:
    with running() as server, terminal(server, "--system", "Be brief.") as person:
        person.types("Hello\r")
        person.waits_for("any sign.")
        person.waits_for("› ")
        person.types("And more\r")
        person.waits_for("any sign.")
        roles = [one["role"] for one in server.bodies[1]["messages"]]
        assert roles == ["system", "user", "assistant", "user"]
        assert server.bodies[1]["messages"][2]["content"] == TEXT + " "
        person.types("/reset\rAgain\r")
        person.waits_for("forgotten")
        person.waits_for("any sign.")
        assert [one["content"] for one in server.bodies[2]["messages"]] == ["Be brief.", "Again"]
        person.types("/exit\r")
        assert person.process.wait(60) == 0


def test_ctrl_c_stops_the_answer_and_not_the_program() -> None:
    with running(endless=True, pause_s=0.01) as server, terminal(server) as person:
        person.types("Hello\r")
        person.waits_for("The sky")
        person.process.send_signal(signal.SIGINT)
        person.waits_for("stopped")
        wait_until_sync(lambda: server.num_closed == 1)
        person.waits_for("› ")
        person.process.send_signal(signal.SIGINT)
        person.waits_for("/exit ends")
        person.waits_for("› ")  # before that a Ctrl-D would be the terminal's own
        person.types("\x04")
        assert person.process.wait(60) == 0


def test_frames_in_pieces_are_decoded() -> None:
    stream = 'data: {"a": "\u2028 \u00e9"}\r\n\r\n: alive\n\ndata:{"b":2}\n\ndata: [DONE]\n\n'.encode()
    for size in (1, 2, 7, 1000):
        frames = SseDecoder()
        found = [frame for i in range(0, len(stream), size) for frame in frames.feed(stream[i : i + size])]
        assert found == [{"a": "\u2028 \u00e9"}, {"b": 2}]


async def test_a_real_gateway_gets_the_flags_and_its_error_is_shown(broker: Broker) -> None:
    """Both sides of the contract are real; only the worker is scripted."""
    async with answering(broker.url, Answer(ids(" It scatters light."))) as (worker, _, client):
        done = await asyncio.to_thread(
            piped, str(client.base_url), b"Why?", "--seed", "7", "--temperature", "0.5", "--max-tokens", "30"
        )
        assert (done.stdout, done.stderr, done.returncode) == (b" It scatters light.\n", b"", 0)
        assert (worker.seen[0].stopping.max_new_tokens, worker.seen[0].prompt_ids != b"") == (30, True)
        done = await asyncio.to_thread(piped, str(client.base_url), b"Why?", "--temperature", "-1")
        assert done.stderr.startswith(b"tokenfleet: the server answers 400: `temperature`: Input should be")


@pytest.mark.parametrize(
    "text", ["localhost:80", "http://localhost:80/", "http://localhost:80/v1", "http://localhost:80/v1/"]
)
def test_a_servers_url_may_have_v1_and_slashes_at_its_end(text: str) -> None:
    assert parse_url(text) == "http://localhost:80"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"error":{"message":"a"}}', "a"),
        (b'{"error":"b","error_type":"x"}', "b"),
        (b'{"detail":"c"}', "c"),
        (b"<html>\n\x1b[2J no</html>", "<html> [2J no</html>"),
        (b"", "(an empty answer)"),
        (b"[]", "[]"),
    ],
)
def test_an_error_of_any_servers_shape_is_one_line(body: bytes, words: str) -> None:
    assert error_message(body) == words


def test_a_loopback_url_is_reached_without_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{free_port()}")
    with running() as server:
        assert piped(server.url, b"Hi", HTTP_PROXY=os.environ["HTTP_PROXY"]).returncode == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(server.url)


LONG_TEXT = "one two three four five six seven eight nine ten " * 6


@pytest.mark.slow
async def test_an_answer_goes_on_when_its_gateway_is_killed(broker: Broker) -> None:
    with GatewayProcesses(broker.url) as gateways:
        async with (
            working(broker.url, TOKENIZER, lambda _: Answer(ids(LONG_TEXT)), step_s=0.03) as worker,
            batching(broker.url),
        ):
            await gateways.until_healthy()
            pieces: list[str] = []
            with httpx.Client(base_url=gateways.url, timeout=90) as client:
                conversation = Conversation(client, {"model": "tgi"})
                sent = asyncio.create_task(asyncio.to_thread(conversation.send, "Count.", pieces.append))
                await wait_until(lambda: len(pieces) > 5)
                gateways.processes[int(worker.seen[0].gateway[1])].kill()
                answer = await sent
        assert "".join(pieces) == answer == LONG_TEXT
        assert len(worker.seen) == 1
