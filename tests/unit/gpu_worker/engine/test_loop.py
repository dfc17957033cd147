"""The leader's loop: which steps are sent together, and waits that end by events, never by their time."""

import contextlib
import socket
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from api.grammar.compile import Grammar, compile_unchecked
from common.messages.plan import Plan
from common.messages.request import BeamParams, LogitsParams, SamplingParams
from gpu_worker.engine import loop, process
from gpu_worker.engine.engine import Engine
from gpu_worker.engine.loop import FEW_ROWS, MAX_HELD_MS, run_steps
from gpu_worker.engine.parallel.communicator import SINGLE_RANK, Communicator
from gpu_worker.protocol import SAMPLE, AgentLink, FrameDecoder, PeerClosed, StepResult, encode
from tests.support.engine.reference import prompt_ids
from tests.support.engine.row_steps import plan, start_row
from tests.support.prompts import FEW, PROMPTS
from tests.support.waiting import PATIENCE_S

SHORT_MS = 0.4 * MAX_HELD_MS
NO_STEP = None


def step(*, rows: int = 1, ms: float = SHORT_MS, **fields: Any) -> StepResult:
    """A step in which each row gets a token."""
    samples = b"".join(SAMPLE.pack(row, 0, 7, -0.5) for row in range(rows))
    return StepResult(1, samples, duration_ms=ms, **fields)


PLAN = Plan(1, 1, 100, 64)


class Sent(AgentLink):
    """The engine's end of a socket. Before each step there is a plan or none; after the last the agent is
    gone.
    """

    def __init__(self, plans: Sequence[Plan | None]) -> None:
        ours, self.agent = socket.socketpair()
        super().__init__(ours)
        self.plans = iter(plans)
        self.sizes: list[int] = []

    def commands(self, wait_s: float) -> Any:
        try:
            plan = next(self.plans)
        except StopIteration:
            raise PeerClosed from None
        return [plan] if plan else []

    def send(self, *frames: Any) -> None:
        super().send(*frames)
        self.sizes.append(len(frames))


def sizes_of(steps: Sequence[StepResult | None], *, rows: int = 1, plan_before: int = -1) -> list[int]:
    """How many steps are sent at a time, when there are `rows` rows and these steps run."""
    results = iter(steps)
    engine = SimpleNamespace(
        rows=SimpleNamespace(rows=dict.fromkeys(range(rows))),
        side_threads=SimpleNamespace(wake=None),
        obey=lambda command: None,
        slack_s=lambda: 0.0,
        step=lambda: next(results),
    )
    link = Sent([PLAN if number == plan_before else None for number in range(len(steps))])
    communicator = cast(Communicator, SimpleNamespace(broadcast_commands=list))
    with link.channel, link.agent, pytest.raises(PeerClosed):
        run_steps(cast(Engine, engine), communicator, link)
    return link.sizes


def test_short_steps_of_few_rows_are_sent_together() -> None:
    assert sizes_of([step()] * 9) == [3, 3, 3]
    assert sizes_of([step(rows=FEW_ROWS)] * 3, rows=FEW_ROWS) == [3]
    assert sizes_of([step(ms=1.1 * MAX_HELD_MS)] * 3) == [1, 1, 1]
    assert sizes_of([step(rows=FEW_ROWS + 1)] * 3, rows=FEW_ROWS + 1) == [1, 1, 1]


@pytest.mark.parametrize(
    "fields", [{"prefilled": [(1, 5)]}, {"ended": [(1, "length", 3)]}, {"released": [(1, 5)]}]
)
def test_what_somebody_waits_for_is_sent_at_once(fields: dict[str, Any]) -> None:
    assert sizes_of([step(), step(**fields), step(**fields)]) == [2, 1]


def test_tokens_do_not_wait_for_a_prompt_or_for_a_step_that_cannot_run() -> None:
    speculated = StepResult(1, 2 * step().samples, duration_ms=SHORT_MS)
    assert sizes_of([step(), speculated], rows=2) == [1, 1], "a row without a token computes its prompt"
    assert sizes_of([step(), step(), step(prefilled=[(2, 5)])], plan_before=2) == [2, 1]
    assert sizes_of([step(), NO_STEP]) == [1]
    assert sizes_of([StepResult(1, num_encoded=1)] * 2, rows=0) == [1, 1]


# --- waits --------------------------------------------------------------------------------------------------


@dataclass
class Agent:
    """The other end of the socket of an engine whose loop runs in a thread."""

    engine: Engine
    channel: socket.socket
    frames: FrameDecoder = field(default_factory=FrameDecoder)

    def start(self, **params: Any) -> None:
        """Start a row of a few tokens."""
        [prompt] = prompt_ids([PROMPTS[FEW[0]]])
        start = start_row(1, prompt, 3, blocks=range(1, 9), **params)
        self.channel.sendall(encode(plan(self.engine.rows.step + 1000, 1000, [start])))

    def result(self) -> StepResult:
        while (frame := next(self.frames, None)) is None:
            data = self.channel.recv(2**16)
            assert data, "the engine is gone"
            self.frames.feed(data)
        assert isinstance(frame, StepResult)
        return frame

    def wait_for_end(self) -> None:
        """Return when the row is released. Raises TimeoutError."""
        while not self.result().released:
            pass


@pytest.fixture
def keepalive_s() -> float:
    return 3600.0


@pytest.fixture
def agent(engine: Engine, keepalive_s: float, monkeypatch: pytest.MonkeyPatch) -> Iterator[Agent]:
    monkeypatch.setattr(loop, "KEEPALIVE_S", keepalive_s)
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
    agent.start(**KINDS[kind])
    agent.wait_for_end()


@pytest.mark.parametrize("keepalive_s", [0.001])
def test_an_engine_whose_rows_wait_for_a_grammar_says_that_it_lives(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, compile = threading.Event(), agent.engine.matchers.compile

    def compile_behind_gate(source: str, tokens: list[int]) -> object:
        assert gate.wait(PATIENCE_S)
        return compile(source, tokens)

    monkeypatch.setattr(agent.engine.matchers, "compile", compile_behind_gate)
    unknown = compile_unchecked(Grammar("regex", "[0-9]{2}-1", "f"))
    agent.start(sampling=SamplingParams(grammar=unknown))
    assert not agent.result().released and not agent.result().released
    gate.set()
    agent.wait_for_end()


@pytest.mark.parametrize(("status", "refused"), [(0, True), (3, False)])
def test_an_import_that_initialises_cuda_is_refused(
    status: int, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPUs of a worker are chosen after the imports."""
    driver = SimpleNamespace(cuDeviceGetCount=lambda _: status)
    monkeypatch.setattr("ctypes.CDLL", lambda _: driver)
    with pytest.raises(RuntimeError, match="CUDA") if refused else contextlib.nullcontext():
        process.check_cuda_is_unused()
