"""The real engine process behind its socket."""

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from gpu_worker.engine import process
from gpu_worker.frames import FrameDecoder, encode
from gpu_worker.protocol import Begin, EngineFailure, Frame, Grant, LoadProgress, Ready, StepResult
from tests.support.engine.batch_player import unpacked
from tests.support.engine.reference import prompt_ids, reference_ids
from tests.support.engine.start_rows import start_row
from tests.support.forks.client import ForkedProcess
from tests.support.prompts import PROMPTS

TIMEOUT_S = 240.0
ENVIRON = {
    "DTYPE": "float32",
    "KV_CACHE_BYTES": "64MiB",
    "MAX_BATCH_PREFILL_TOKENS": "64",
    "DEBUG_KV": "true",
}


@dataclass
class Child:
    process: subprocess.Popen[bytes]
    channel: socket.socket
    frames: FrameDecoder = field(default_factory=FrameDecoder)

    def send(self, frame: Frame) -> None:
        self.channel.sendall(encode(frame))

    def receive(self) -> Frame:
        while (frame := next(self.frames, None)) is None:
            data = self.channel.recv(2**16)
            assert data, "the engine is gone"
            self.frames.feed(data)
        return frame

    def ready(self) -> Ready | EngineFailure:
        while isinstance(frame := self.receive(), LoadProgress):
            assert frame.text
        assert isinstance(frame, Ready | EngineFailure)
        return frame


def start_child(*flags: str, start: type[subprocess.Popen[bytes]] = ForkedProcess, **environ: str) -> Child:
    ours, theirs = socket.socketpair()
    ours.settimeout(TIMEOUT_S)
    with theirs:
        command = [sys.executable, "-m", "gpu_worker.engine", "--fd", str(theirs.fileno()), *flags]
        process = start(
            command,
            pass_fds=[theirs.fileno()],
            env=os.environ | ENVIRON | environ,
        )
    return Child(process, ours)


def end(child: Child) -> int:
    child.channel.close()
    try:
        return child.process.wait(TIMEOUT_S)
    finally:
        child.process.kill()


@pytest.fixture
def child(request: pytest.FixtureRequest) -> Iterator[Child]:
    child = start_child(**getattr(request, "param", {}))
    yield child
    end(child)


@pytest.mark.slow
@pytest.mark.parametrize(
    "child",
    [{}, pytest.param({"start": subprocess.Popen}, marks=pytest.mark.slow)],
    ids=["forked", "started"],
    indirect=True,
)
def test_tokens_arrive_through_the_socket(child: Child) -> None:
    """Signals are ignored, two grants that arrive together
    are both applied, a stop without a step has a result, and a crash of the engine itself is reported: a row
    for which the forward raises only fails alone.
    """
    index = 4
    prompt = prompt_ids(PROMPTS)[index]
    ready = child.ready()
    assert isinstance(ready, Ready)
    assert (ready.block_size, ready.context, unpacked(ready.eos_ids), ready.dtype) == (
        16,
        8192,
        [2],
        "float32",
    )
    child.process.terminate()
    child.send(Grant(3, 64, [start_row(7, prompt, 40, blocks=[1, 2, 3, 4])]))
    child.send(Grant(5, 64))
    ids: list[int] = []
    while len(ids) < 5:
        step = child.receive()
        assert isinstance(step, StepResult) and step.duration_ms > 0
        ids += [token for _, _, token, _ in step.sampled]
    assert ids == reference_ids([prompt], 40)[0][:5]
    child.send(Grant(5, 64, stops=[(7, "cancelled")]))
    assert child.receive() == StepResult(5, ended=((7, "cancelled", 5),), released=((7, len(prompt) + 4),))
    assert Path(f"/proc/{child.process.pid}/cmdline").read_text().startswith("tokenfleet engine")
    child.send(Grant(6, 64, [replace(start_row(1, [1], 40, blocks=[1]), ids=b"no ids")]))
    failure = child.receive()
    assert isinstance(failure, EngineFailure) and failure.setting == "" and "ValueError" in failure.cause
    assert child.process.wait(TIMEOUT_S) == 1


@pytest.mark.parametrize(
    ("child", "setting", "words"),
    [
        pytest.param(
            {"KV_CACHE_BYTES": "1000000GiB"},
            "kv_cache_bytes",
            "MiB of memory are available",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"KV_CACHE_BYTES": "1KiB"}, "kv_cache_bytes", "one block of 16 tokens", marks=pytest.mark.slow
        ),
        pytest.param({"MODEL_ID": "/nowhere"}, "model_id", "/nowhere does not exist", marks=pytest.mark.slow),
        ({"BLOCK_SIZE": "many"}, "block_size", "'many' is not a whole number"),
    ],
    indirect=["child"],
)
def test_unservable_settings_are_reported(child: Child, setting: str, words: str) -> None:
    failure = child.ready()
    assert (
        isinstance(failure, EngineFailure)
        and failure.setting == setting
        and words in failure.cause
        and "\n" not in failure.cause
    )
    assert child.process.wait(TIMEOUT_S) == 1


@pytest.mark.slow
def test_a_preloaded_engine_imports_only_and_loads_with_the_variables_it_is_given() -> None:
    """Until then it has no title of a worker, and has not read a setting. A closed socket ends it."""
    child = start_child("--preload", MODEL_ID="/nowhere", BLOCK_SIZE="many")
    try:
        assert child.receive() == LoadProgress("preloaded")
        assert " ".join(psutil.Process(child.process.pid).cmdline()).strip() == "tokenfleet engine preloaded"
        child.send(Begin({"MODEL_ID": "smollm2", "BLOCK_SIZE": "32", "WORKER_NAME": "w3"}))
        ready = child.ready()
        assert isinstance(ready, Ready) and ready.block_size == 32
        assert " ".join(psutil.Process(child.process.pid).cmdline()).strip() == "tokenfleet engine w3"
    finally:
        assert end(child) == 0


@pytest.mark.slow
def test_a_preloaded_engine_with_its_model_loads_nothing_when_it_is_used() -> None:
    index = 4
    prompt = prompt_ids(PROMPTS)[index]
    child = start_child("--preload", "--load")
    try:
        assert child.receive() == LoadProgress("preloaded")
        child.send(Begin({"WORKER_NAME": "w3"}))
        assert child.receive() == LoadProgress("measuring its speed")
        assert isinstance(child.ready(), Ready)
        child.send(Grant(3, 64, [start_row(7, prompt, 3, blocks=[1, 2, 3, 4])]))
        ids: list[int] = []
        while len(ids) < 3:
            step = child.receive()
            assert isinstance(step, StepResult)
            ids += [token for _, _, token, _ in step.sampled]
        assert ids == reference_ids([prompt], 40)[0][:3]
    finally:
        assert end(child) == 0


def test_a_preloaded_engine_ends_with_its_agent() -> None:
    child = start_child("--preload")
    assert end(child) == 0


@pytest.mark.parametrize(("status", "refused"), [(0, True), (3, False)])
def test_an_import_that_initialises_cuda_is_refused(
    status: int, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPUs of a worker are chosen after the imports."""
    driver = SimpleNamespace(cuDeviceGetCount=lambda _: status)
    monkeypatch.setattr("ctypes.CDLL", lambda _: driver)
    with pytest.raises(RuntimeError, match="CUDA") if refused else contextlib.nullcontext():
        process.check_cuda_is_unused()
