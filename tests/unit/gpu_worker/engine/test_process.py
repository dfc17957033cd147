"""The leader's loop, whose waits end by events, never by their time."""

import contextlib
import socket
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from api.grammar.compile import Grammar, compile_unchecked
from common.messages.plan import NewRow
from common.messages.request import BeamParams, LogitsParams, SamplingParams
from gpu_worker.engine import loop, process
from gpu_worker.engine.engine import Engine
from gpu_worker.engine.parallel.communicator import SINGLE_RANK
from gpu_worker.protocol import (
    AgentLink,
    Frame,
    FrameDecoder,
    PeerClosed,
    StepResult,
    encode,
)
from tests.support.engine.reference import prompt_ids
from tests.support.engine.row_steps import plan, start_row
from tests.support.prompts import FEW, PROMPTS
from tests.support.waiting import PATIENCE_S

FOR_EVER_S = 3600.0


@dataclass
class Agent:
    """The other end of the socket of an engine whose loop runs in a thread."""

    engine: Engine
    channel: socket.socket
    frames: FrameDecoder = field(default_factory=FrameDecoder)
    number: int = 0

    def send(self, frame: Frame) -> None:
        self.channel.sendall(encode(frame))

    def start_one(self, start: NewRow) -> None:
        self.send(plan(self.engine.rows.step + 1000, 1000, [start]))
        self.wait_for([start.row])

    def start(self, *sources: str) -> list[int]:
        """Start rows of one token, one for each grammar → their numbers."""
        [prompt] = prompt_ids([PROMPTS[FEW[0]]])
        numbers = [self.number + place for place in range(1, 1 + len(sources))]
        self.number = numbers[-1]
        starts = [
            start_row(number, prompt, 1, blocks=blocks(number), sampling=SamplingParams(grammar=source))
            for number, source in zip(numbers, sources, strict=True)
        ]
        self.send(plan(self.engine.rows.step + 1000, 1000, starts))
        return numbers

    def result(self) -> StepResult:
        while (frame := next(self.frames, None)) is None:
            data = self.channel.recv(2**16)
            assert data, "the engine is gone"
            self.frames.feed(data)
        assert isinstance(frame, StepResult)
        return frame

    def wait_for(self, numbers: Sequence[int]) -> None:
        """Return when these rows have ended. Raises TimeoutError."""
        left = set(numbers)
        while left:
            left -= {number for number, _ in self.result().released}


def blocks(number: int) -> list[int]:
    """Blocks that no other row has of those that live with this one."""
    first = 1 + 8 * (number % 8)
    return list(range(first, first + 8))


@pytest.fixture
def keepalive_s() -> float:
    return FOR_EVER_S


@pytest.fixture
def agent(engine: Engine, keepalive_s: float, monkeypatch: pytest.MonkeyPatch) -> Iterator[Agent]:
    monkeypatch.setattr(loop, "KEEPALIVE_S", keepalive_s)
    with agent_of(engine) as agent:
        yield agent


@contextlib.contextmanager
def agent_of(engine: Any) -> Iterator[Agent]:
    ours, theirs = socket.socketpair()
    ours.settimeout(PATIENCE_S)
    thread = threading.Thread(target=run, args=(engine, theirs))
    thread.start()
    with ours, theirs:
        yield Agent(engine, ours)
        ours.shutdown(socket.SHUT_RDWR)
        thread.join(PATIENCE_S)
    assert not thread.is_alive() and not engine.rows.rows


def run(engine: Engine, channel: socket.socket) -> None:
    with pytest.raises(PeerClosed):
        loop.run_leader(engine, SINGLE_RANK, AgentLink(channel))


def fresh(number: int) -> str:
    """A grammar that nobody has compiled."""
    return compile_unchecked(Grammar("regex", f"[0-9]{{2}}-{number}", "f"))


def gated(monkeypatch: pytest.MonkeyPatch, engine: Engine) -> threading.Event:
    """What must be set before a compilation ends."""
    gate, compile = threading.Event(), engine.matchers.compile

    def compile_behind_gate(source: str, tokens: list[int]) -> object:
        assert gate.wait(PATIENCE_S)
        return compile(source, tokens)

    monkeypatch.setattr(engine.matchers, "compile", compile_behind_gate)
    return gate


KINDS: dict[str, dict[str, Any]] = {
    "text": {},
    "sampled": {"sampling": SamplingParams(temperature=1.0, top_p=0.9), "top_n_tokens": 2},
    "grammar": {"sampling": SamplingParams(grammar=compile_unchecked(Grammar("regex", "[0-9]{2}", "f")))},
    "allowed": {"sampling": SamplingParams(allowed_token_ids=[7, 8])},
    "prompt_logprobs": {"prompt_logprobs": 1},
    "logits": {"logits": LogitsParams(True, True, "float32", 1)},
    "beams": {"beams": BeamParams(2)},
    "beams_with_stop": {"beams": BeamParams(2), "stop": [" the"]},
    "bad_adapter": {"adapter": "none"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_no_request_to_an_idle_engine_waits_for_the_keep_alive(agent: Agent, kind: str) -> None:
    [prompt] = prompt_ids([PROMPTS[FEW[0]]])
    agent.start_one(start_row(1, prompt, 3, blocks=blocks(1), **KINDS[kind]))


@pytest.mark.parametrize("keepalive_s", [0.001])
def test_an_engine_whose_rows_wait_for_a_grammar_says_that_it_lives(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = gated(monkeypatch, agent.engine)
    numbers = agent.start(fresh(1))
    assert not agent.result().released and not agent.result().released
    gate.set()
    agent.wait_for(numbers)


@pytest.mark.parametrize(("status", "refused"), [(0, True), (3, False)])
def test_an_import_that_initialises_cuda_is_refused(
    status: int, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPUs of a worker are chosen after the imports."""
    driver = SimpleNamespace(cuDeviceGetCount=lambda _: status)
    monkeypatch.setattr("ctypes.CDLL", lambda _: driver)
    with pytest.raises(RuntimeError, match="CUDA") if refused else contextlib.nullcontext():
        process.check_cuda_is_unused()
