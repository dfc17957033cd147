"""The leader's loop: what ends its waits. None ends by its time here, so that a lost wake-up hangs."""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pytest

from api.grammar.compile import Grammar, compile_unchecked
from common.messages.request import BeamParams, SamplingParams
from common.settings.settings import Settings
from gpu_worker.engine import loop
from gpu_worker.engine.agent_link import AgentLink
from gpu_worker.engine.batch.rows import Rows
from gpu_worker.engine.engine import Engine
from gpu_worker.engine.parallel.communicator import SINGLE_RANK
from gpu_worker.frames import FrameDecoder, encode
from gpu_worker.protocol import Frame, Grant, PeerClosed, StartRow, StepResult
from tests.support.chaos.random_delays import RandomDelays
from tests.support.engine.pictures.models import picture, save
from tests.support.engine.pictures.seeing import SETTINGS
from tests.support.engine.reference import prompt_ids
from tests.support.engine.start_rows import start_row
from tests.support.prompts import FEW, PROMPTS
from tests.support.runahead.each_way import IN_TURN
from tests.support.waiting import PATIENCE_S

FOR_EVER_S = 3600.0
NUM_GRAMMARS = 200


@dataclass
class Agent:
    """The other end of the socket of an engine whose loop runs in a thread."""

    engine: Engine
    channel: socket.socket
    frames: FrameDecoder = field(default_factory=FrameDecoder)
    number: int = 0

    def send(self, frame: Frame) -> None:
        self.channel.sendall(encode(frame))

    def start_one(self, start: StartRow) -> None:
        self.send(Grant(self.engine.rows.step + 1000, 1000, [start]))
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
        self.send(Grant(self.engine.rows.step + 1000, 1000, starts))
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
    "logits": {"logits": (0, 3, "float32")},
    "beams": {"beams": BeamParams(2)},
    "beams_with_stop": {"beams": BeamParams(2), "stop": [" the"]},
    "bad_adapter": {"adapter": "none"},
}


@IN_TURN
@pytest.mark.parametrize("kind", KINDS)
def test_no_request_to_an_idle_engine_waits_for_the_keep_alive(agent: Agent, kind: str) -> None:
    [prompt] = prompt_ids([PROMPTS[FEW[0]]])
    agent.start_one(start_row(1, prompt, 3, blocks=blocks(1), **KINDS[kind]))


def test_no_picture_waits_for_the_keep_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row waits for its pictures, of which two are processed at a time, then proposes tokens."""
    monkeypatch.setattr(loop, "KEEPALIVE_S", FOR_EVER_S)
    model = save(tmp_path, "Qwen2-VL")
    pictures = [part for seed in range(5) for part in (picture(seed), [5, 6])]
    prompt = model.prompt(*pictures)
    with agent_of(Engine(Settings(model_id=str(tmp_path), speculate=3, **SETTINGS))) as agent:
        agent.start_one(start_row(1, prompt.ids, 8, blocks=range(1, 20), pictures=prompt.pictures))


@IN_TURN
def test_a_compilation_that_ends_between_a_step_and_the_wait_behind_it_ends_the_wait(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = agent.engine
    gate, step = gated(monkeypatch, engine), engine.step

    def step_then_compile() -> StepResult | None:
        result = step()
        if result is None and engine.rows.rows:
            gate.set()
            for row in engine.rows.rows.values():
                assert row.sampling_state
                row.sampling_state.grammar.compiled.result(PATIENCE_S)  # type: ignore[union-attr]
        return result

    monkeypatch.setattr(engine, "step", step_then_compile)
    agent.wait_for(agent.start(fresh(0)))


@IN_TURN
@pytest.mark.parametrize("keepalive_s", [0.001])
def test_an_engine_whose_rows_wait_for_a_grammar_says_that_it_lives(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = gated(monkeypatch, agent.engine)
    numbers = agent.start(fresh(1))
    assert not agent.result().released and not agent.result().released
    gate.set()
    agent.wait_for(numbers)


@pytest.mark.slow
@IN_TURN
def test_no_end_of_a_compilation_is_lost_whatever_is_late(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = Random(1)
    delays = RandomDelays(random, most_s=0.004)
    late: list[tuple[object, str]] = [
        (AgentLink, "read"),
        (AgentLink, "wake"),
        (agent.engine, "step"),
        (Rows, "schedule_slices"),
        (agent.engine.matchers, "compile"),
    ]
    for owner, name in late:
        function: Callable[..., object] = getattr(owner, name)
        monkeypatch.setattr(owner, name, delays.around(function))
    for number in range(NUM_GRAMMARS):
        sources = [fresh(10 * number + place) for place in range(random.randint(1, 4))]
        together = random.randint(0, len(sources))
        numbers = agent.start(*sources[:together]) if together else []
        numbers += agent.start(*sources[together:]) if sources[together:] else []
        agent.wait_for(numbers)
