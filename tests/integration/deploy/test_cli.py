"""The command line refuses what it cannot serve: one line, within seconds, and a non-zero exit code."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from deploy.launcher import prepare
from tests.support.forks import client as forks
from tests.support.forks import command
from tests.support.machine.ports import free_port

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
        (["serve", "model", "another"], "ARGUMENTS: 'another' is not expected"),
        (["serve", "--num-batchers", "0"], "NUM_BATCHERS: 0 is less than 1"),
        (
            ["serve", "--device", "cpu", "--num-workers", "2", "--kv-cache-bytes", "8192GiB"],
            "KV_CACHE_BYTES: 8388608 MiB for each of 2 (NUM_WORKERS), but only",
        ),
        (["api", "--port", "70000"], "PORT: 70000 is more than 65535"),
        (["serve", "--hostname", "203.0.113.1"], "HOSTNAME: cannot listen"),
        (["worker"], "REDIS_URL: is not set"),
        (["drain"], "WORKER: is missing; `tokenfleet drain --help` says what it is"),
        (["chat", "--seed", "x"], "--seed: invalid int value: 'x'"),
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
    assert "serve [MODEL]" in says("--help")
    assert "{api,batcher,worker,jobworker}" in says("supervise", "--help")
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
