"""The command line refuses what it cannot serve: one line, within seconds, and a non-zero exit code.
`tokenfleet bench`: its arithmetic, and runs against servers that speak as others do. `tokenfleet chat` as a
user sees it, through a pipe and in a terminal of its own.
"""

import asyncio
import codecs
import contextlib
import json
import os
import pty
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from common.settings.settings import SettingError
from deploy.cli import admin
from deploy.cli.bench import Endpoint, TimedAnswer, figures_of, percentile
from deploy.cli.chat import Conversation
from deploy.cli.client import SseDecoder, error_message, parse_url
from deploy.launcher import prepare
from deploy.launcher.embedded_broker import Broker
from tests.support.fleet.batchers import batching
from tests.support.fleet.gateways import GatewayProcesses, answering
from tests.support.fleet.scripted_worker import EOS, Answer, working
from tests.support.forks import client as forks
from tests.support.forks import command
from tests.support.machine.ports import free_port
from tests.support.other_servers import WORDS, Server, running
from tests.support.tokenizer import TOKENIZER, ids
from tests.support.waiting import wait_until, wait_until_sync

ENVIRON = {name: value for name, value in os.environ.items() if name not in ("REDIS_URL", "MODEL_ID", "PORT")}
COMMAND = str(Path(sys.executable).parent / "tokenfleet")
Run = Callable[..., subprocess.CompletedProcess[str]]


def tokenfleet(*argv: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the command as a user starts it."""
    words = [COMMAND, *argv]
    return subprocess.run(words, env=ENVIRON | variables, capture_output=True, text=True, timeout=90)


def forked(*argv: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the command without the imports."""
    done = command.tokenfleet(*argv, environ=ENVIRON | variables)
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


@pytest.fixture(scope="module", autouse=True)
def fork_server() -> None:
    """Start the fork server before anything is timed."""
    forks.server()


def refusal(*argv: str, run: Run = forked, **variables: str) -> str:
    begun_s = time.monotonic()
    done = run(*argv, **variables)
    assert time.monotonic() - begun_s < 30
    assert done.returncode == os.EX_CONFIG
    assert done.stdout == ""
    [line] = done.stderr.splitlines()
    return line


def test_a_taken_port_is_refused() -> None:
    with socket.create_server(("0.0.0.0", 0), reuse_port=True) as taken:
        port = taken.getsockname()[1]
        assert (
            refusal("serve", "--port", str(port), run=tokenfleet)
            == f"tokenfleet: PORT: 0.0.0.0:{port} is taken by another process"
        )


def test_a_port_in_time_wait_is_free() -> None:
    """Connections of an earlier fleet linger on the port (TIME_WAIT). The next check must be the one that
    fails.
    """
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as client,
    ):
        port = server.getsockname()[1]
        accepted, _ = server.accept()
        accepted.close()
        client.recv(1)
    assert refusal("serve", "/no/such/model", "--port", str(port), "--hostname", "127.0.0.1").startswith(
        "tokenfleet: MODEL_ID:"
    )


@pytest.mark.parametrize("command", ["serve", "worker"])
def test_an_unreachable_broker_is_refused(command: str) -> None:
    url = f"redis://:secret@127.0.0.1:{free_port()}"
    line = refusal(command, PORT=str(free_port()), REDIS_URL=url)
    assert line.startswith("tokenfleet: REDIS_URL: no connection to the broker (127.0.0.1:")
    assert "secret" not in line


@pytest.mark.slow
@pytest.mark.parametrize("words", [("serve",), ("batcher",), ("drain", "w0")])
def test_other_users_of_the_machine_see_no_password_among_the_words_of_a_command(
    words: tuple[str, ...],
) -> None:
    """`ps` shows a command line to every user while the command runs."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"redis://:secret@127.0.0.1:{silent.getsockname()[1]}"
        command = [sys.executable, "-P", "-m", "deploy.cli", *words, "--redis-url", url]
        process = subprocess.Popen(
            command, env=ENVIRON | {"PORT": str(free_port())}, stderr=subprocess.DEVNULL
        )
        try:
            silent.accept()  # it waits for an answer now
            shown = psutil.Process(process.pid).cmdline()
        finally:
            process.kill()
            process.wait()
    assert " ".join(shown).strip() == f"tokenfleet {words[0]}"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["serv"], "COMMAND: 'serv' is not a command; the nearest is serve"),
        (["jobs"], "LIST|SHOW|CANCEL|RETRY|DEAD: is missing; `tokenfleet jobs --help` says what it is"),
        (["serve", "--prot", "80"], "--prot: unknown flag; the nearest is --port"),
        (
            ["serve", "--device", "cpu", "--num-workers", "2", "--kv-cache-bytes", "8192GiB"],
            "KV_CACHE_BYTES: 8388608 MiB for each of 2 (NUM_WORKERS), but only",
        ),
        (["api", "--port", "70000"], "PORT: 70000 is more than 65535"),
        (["serve", "--hostname", "203.0.113.1"], "HOSTNAME: cannot listen"),
        (["worker"], "REDIS_URL: is not set"),
        (["drain"], "WORKER: is missing; `tokenfleet drain --help` says what it is"),
        (["chat", "--seed", "x"], "--seed: invalid int value: 'x'"),
        (["explain", "a\udcff"], r"COMMAND: 'a\udcff' has bytes that are not UTF-8"),
    ],
)
def test_invalid_arguments_are_one_error_line(argv: list[str], words: str) -> None:
    assert words in refusal(*argv)


@pytest.mark.parametrize(
    ("argv", "environ", "words"),
    [
        (["serve"], {"XDG_CACHE_HOME": "/proc/x"}, "XDG_CACHE_HOME: /proc/x cannot be written to (No such"),
        (["serve", "--device", "cuda"], {"XDG_CACHE_HOME": "/proc/x"}, "DEVICE: cuda, but this machine has"),
        (
            ["batcher"],
            {"REDIS_URL": "rediss://127.0.0.1:1/?ssl_ca_certs=/none"},
            "REDIS_URL: cannot read ssl_ca_certs /none: No such file or directory",
        ),
    ],
)
@pytest.mark.skipif(prepare.NVIDIA.exists(), reason="this machine has a driver")
def test_a_place_that_is_not_there_is_refused_by_the_name_of_its_setting(
    argv: list[str], environ: dict[str, str], words: str
) -> None:
    variables: Any = {"PORT": str(free_port()), **environ}
    assert words in refusal(*argv, **variables)


INTERRUPTED_IMPORT = """
import os, runpy, signal, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "common":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder())
signal.signal(signal.SIGINT, signal.default_int_handler)
"""
"""A program that sends itself SIGINT when it is about to import our first module."""


@pytest.mark.parametrize(
    "start",
    [
        "runpy.run_module('deploy.cli', run_name='__main__')",
        "runpy.run_path(sys.argv[1], run_name='__main__')",
    ],
)
def test_ctrl_c_while_it_imports_ends_it_in_silence(start: str) -> None:
    words = [sys.executable, "-c", INTERRUPTED_IMPORT + start, COMMAND]
    done = subprocess.run(words, env=ENVIRON, capture_output=True, text=True, timeout=90)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def says(*argv: str, run: Run = forked, **variables: str) -> str:
    return run(*argv, **variables).stdout


def test_help_lists_commands_and_settings() -> None:
    assert says("-h") == says("--help") and "serve [MODEL]" in says("-h")
    assert says("serve", "-h") == says("serve", "--help")
    assert "{api,batcher,worker}" in says("supervise", "--help")
    text = says("serve", "--help")
    assert text.startswith(
        "usage: tokenfleet serve [MODEL] [--setting X …]\n\nStart everything on this machine:"
    )
    assert "It needs REDIS_URL. --name X (default w0)" in " ".join(says("worker", "--help").split())
    assert "--port X" in text and "--uds-path" not in text and "\nRecovery:\n" not in text
    everything = says("serve", "--help-all")
    assert "\nBatching:\n" in everything and "--max-batch-prefill-tokens" in everything
    assert "--tokenizer X see --tokenizer-name" in " ".join(everything.split())
    in_ascii = says("serve", "--help", run=tokenfleet, PYTHONIOENCODING="ascii")
    assert in_ascii.startswith("usage: tokenfleet serve [MODEL] [--setting X ?]")
    assert says("--version") == says("serve", "--version") == says("serve", "-V")
    assert says("--version").startswith("tokenfleet ")


# --- bench --------------------------------------------------------------------------------------------------

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
        (["--json", "/no/such/place.json"], "FILE: /no/such/place.json cannot be used: No such file"),
    ],
)
def test_invalid_flags_are_refused(argv: list[str], words: str) -> None:
    with pytest.raises(SettingError) as error:
        admin.main(["bench", "--url", "http://127.0.0.1:9", *argv])
    assert words in str(error.value)


# --- chat ---------------------------------------------------------------------------------------------------

CHAT_COMMAND = [
    sys.executable,
    "-P",
    "-c",
    "import sys; from deploy.cli import admin; sys.exit(admin.main(['chat', *sys.argv[1:]]))",
]
OF_TERMINAL = {name: value for name, value in os.environ.items() if name not in ("API_KEY", "PORT")} | {
    "TERM": "xterm"
}
ANSWER = " ".join(WORDS)


def piped(server_url: str, text: bytes, *flags: str, **variables: str) -> subprocess.CompletedProcess[bytes]:
    return command.tokenfleet(
        "chat", "--url", server_url, *flags, environ=OF_TERMINAL | variables, content=text
    )


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
    command = [*CHAT_COMMAND, "--url", server.url, *flags]
    process = subprocess.Popen(
        command,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=OF_TERMINAL,
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
        assert (done.stdout.decode(), done.stderr) == (ANSWER + " \n", b"")
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


def test_reasoning_is_dimmed_or_on_stderr_and_no_part_of_the_conversation() -> None:
    with running(num_thoughts=3) as server:
        done = piped(server.url, b"Why?", "--max-tokens", "5")
        assert (done.stdout, done.stderr) == (b"blue because \n", b"The sky is \n")
        with terminal(server, "--max-tokens", "3") as person:
            for question in ("Why?", "And now?"):
                person.types(f"{question}\n")
                person.waits_for("\x1b[2mThe \x1b[0m\x1b[2msky \x1b[0m\x1b[2mis \x1b[0m")
                person.waits_for("› ")
    assert server.bodies[-1]["messages"] == [
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "And now?"},
    ]


def test_an_error_after_the_first_token_is_shown() -> None:
    with running(late_error={"error": {"message": "the worker is gone"}}) as server:
        done = piped(server.url, b"Hi")
    assert done.stdout.startswith(WORDS[0].encode())
    assert done.stderr == b"tokenfleet: the server ends the answer: the worker is gone\n"
    assert done.returncode == 1


@pytest.mark.parametrize(
    ("redirected", "code", "said"),
    [
        ("--help", 141, ""),
        ("--help >/dev/full", 1, "tokenfleet: [Errno 28] No space left on device\n"),
        ("chat --url $0 >&-", 0, ""),
    ],
)
def test_output_that_nobody_takes_ends_a_command_without_a_traceback(
    redirected: str, code: int, said: str
) -> None:
    """Unless a row redirects it, it is a pipe whose reader has left."""
    reader, writer = os.pipe()
    os.close(reader)
    with running() as server, open(writer, "wb") as pipe:
        words = ["sh", "-c", f"exec {COMMAND} {redirected}", server.url]
        stderr = subprocess.PIPE
        done = subprocess.run(words, input=b"Hi", env=OF_TERMINAL, stdout=pipe, stderr=stderr, timeout=90)
    assert (done.returncode, done.stderr.decode()) == (code, said)


def test_a_key_that_is_not_ascii_is_refused() -> None:
    with running() as server:
        done = piped(server.url, b"Hi", API_KEY="\u043a\u043b\u044e\u0447")
    assert (
        done.stderr
        == b"tokenfleet: API_KEY has characters that are not ASCII, which no HTTP header can carry\n"
    )


def test_a_conversation_in_a_terminal() -> None:
    with running() as server, terminal(server, "--system", "Be brief.") as person:
        person.types("Hello\r")
        person.waits_for("any sign.")
        person.waits_for("› ")
        person.types("And more\r")
        person.waits_for("any sign.")
        roles = [one["role"] for one in server.bodies[1]["messages"]]
        assert roles == ["system", "user", "assistant", "user"]
        assert server.bodies[1]["messages"][2]["content"] == ANSWER + " "
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
        assert (done.stdout, done.returncode) == (b"", 1)
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
