"""The agent's side of the protocol (gpu_worker/protocol.py): starts the engine processes, sends grants,
receives steps, and counts these. Steps are counted several at once, never token by token.
"""

import asyncio
import contextlib
import os
import socket
import sys
import time
from asyncio.subprocess import Process
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import cast

from common.messages.plan import Plan, WorkerCapacity
from common.metrics import catalogue
from common.process.launch import ForkedProcess, shared_handles
from common.process.machine import run_delay_s
from common.rank import RankInfo
from common.settings.settings import SettingError
from gpu_worker.protocol import (
    AdapterAnswer,
    Asleep,
    Begin,
    End,
    EngineFailure,
    Frame,
    FrameDecoder,
    LoadProgress,
    ProtocolError,
    SetAdapter,
    Sleep,
    StepResult,
    WakeUp,
    encode,
)

COUNTED_AT_ONCE = 64
"""Steps that are counted together at most: the code that counts is not in the processor's caches."""


class BatchMetrics:
    """Counts plans and steps as they pass the engine client.

    Attributes:
        prefilling: rows whose prompt is not computed yet → tokens whose KV they found in the cache.
        running: rows that decode.
        steps, handled_s: steps that are not counted yet, and the agent's time for them.
    """

    def __init__(self) -> None:
        self.prefilling: dict[int, int] = {}
        self.running: set[int] = set()
        self.steps: list[StepResult] = []
        self.handled_s = 0.0

    def on_plan(self, plan: Plan, started_s: float) -> None:
        """Count a plan that was sent; `started_s` is when its sending began."""
        if not plan.starts:
            return
        self.count_steps()
        catalogue.BATCH_NEXT_SIZE.observe(len(plan.starts))
        if self.running:
            catalogue.BATCH_CONCAT_DURATION.observe(time.perf_counter() - started_s, "decode")
        self.prefilling.update((start.row, start.num_cached) for start in plan.starts)

    def on_steps(self, steps: Sequence[StepResult], handled_s: float) -> None:
        """Note steps, which took the agent `handled_s` together."""
        self.steps += steps
        self.handled_s += handled_s
        if len(self.steps) >= COUNTED_AT_ONCE:
            self.count_steps()

    def count_steps(self) -> None:
        """Count the steps that were noted since the last call."""
        steps, self.steps = self.steps, []
        if not steps:
            return
        text_s, self.handled_s = self.handled_s / len(steps), 0.0
        forwards: dict[str, list[float]] = {"prefill": [], "decode": []}
        for step in steps:
            if step.duration_ms:
                forwards[method_of(step)].append(step.duration_ms / 1000)
            self.move_rows(step)
            if step.proposals:
                count_proposals(step)
        for method, forwards_s in forwards.items():
            if forwards_s:
                self.count(method, forwards_s, text_s)
        catalogue.TOKENS.add(sum(step.num_samples + step.num_beams for step in steps))
        if num_plain := sum(step.num_samples for step in steps if not step.proposals):
            catalogue.SKIPPED_TOKENS.observe(0, times=num_plain)

    def count(self, method: str, forwards_s: Sequence[float], text_s: float) -> None:
        """Count steps of one method, each of which took the agent `text_s`."""
        catalogue.BATCH_COUNT.add(len(forwards_s), method)
        catalogue.BATCH_SUCCESS.add(len(forwards_s), method)
        catalogue.BATCH_FORWARD.observe_all(forwards_s, method)
        catalogue.BATCH_DECODE.observe(text_s, method, times=len(forwards_s))
        catalogue.BATCH_DURATION.observe_all([forward_s + text_s for forward_s in forwards_s], method)

    def move_rows(self, step: StepResult) -> None:
        for row, kv_len in step.prefilled:
            catalogue.PREFILLED_TOKENS.add(kv_len - self.prefilling.pop(row, 0))
            self.running.add(row)
        for row, _, _ in step.ended:
            self.prefilling.pop(row, None)
            self.running.discard(row)

    def on_failure(self) -> None:
        """Count the batch that the engine lost when it died. Its method is a guess: rows may stand by."""
        self.count_steps()
        method = "prefill" if self.prefilling else "decode"
        if self.prefilling or self.running:
            catalogue.BATCH_COUNT.add(1, method)
            catalogue.BATCH_FAILURE.add(1, method)


def count_proposals(step: StepResult) -> None:
    """Count a step that checked proposed tokens: each row has one token of the step's own, and those accepted
    beside it.
    """
    num_tokens = Counter(row for row, *_ in step.sampled)
    for method, number, num_right in step.proposals:
        catalogue.PROPOSALS.add(1, method)
        catalogue.PROPOSED_TOKENS.add(number, method)
        catalogue.ACCEPTED_TOKENS.add(num_right, method)
        for position in range(num_right):
            catalogue.ACCEPTED_AT.add(1, str(position))
    catalogue.SKIPPED_TOKENS.observe_all([number - 1 for number in num_tokens.values()])


def method_of(step: StepResult) -> str:
    """The kind of a step: one that computes any prompt is a prefill."""
    return "prefill" if step.prefill_tokens or step.prefilled else "decode"


ENGINE_MODULE = "gpu_worker.engine"
"""What an engine process runs."""
END_TIMEOUT_S = 2.0

StepsHandler = Callable[[Sequence[StepResult]], None]


class RankProcess(asyncio.Protocol):
    """The engine process of one rank, and the socket to it: sends frames, and takes the rank's frames as they
    come.

    The listener is called in the call that brings frames: to wake a task would take as long as all that an
    agent does with the tokens of a step.

    Attributes:
        frames: received and not taken yet. Bytes that are no frame become an EngineFailure.
        is_open: whether the rank may send more.
        listener: called when frames have come, or the rank has closed its socket.
    """

    transport: asyncio.Transport

    def __init__(self, process: Process | ForkedProcess) -> None:
        self.process = process
        self.decoder = FrameDecoder()
        self.frames: deque[Frame] = deque()
        self.is_open = True
        self.listener: Callable[[], None] | None = None

    @classmethod
    async def open(cls, process: Process | ForkedProcess, channel: socket.socket) -> "RankProcess":
        loop = asyncio.get_running_loop()
        _, rank = await loop.create_unix_connection(partial(cls, process), sock=channel)
        return rank

    @classmethod
    async def start(cls, environ: Mapping[str, str]) -> "RankProcess":
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", ENGINE_MODULE, str(theirs.fileno())),
                pass_fds=[theirs.fileno(), *shared_handles(os.environ)],
                stdin=asyncio.subprocess.DEVNULL,
                env={**os.environ, **environ, "PARENT_PID": str(os.getpid())},
            )
        return await cls.open(process, ours)

    def kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()

    def send(self, frame: Frame) -> None:
        self.transport.write(encode(frame))

    async def receive(self) -> Frame | None:
        """Return the next frame; None once the rank has closed its socket."""
        while not self.frames and self.is_open:
            arrived = asyncio.Event()
            self.listener = arrived.set
            try:
                await arrived.wait()
            finally:
                self.listener = None
        return self.frames.popleft() if self.frames else None

    def pop_frames(self) -> list[Frame]:
        """Take all frames received."""
        frames = [*self.frames]
        self.frames.clear()
        return frames

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            self.decoder.feed(data)
            self.frames.extend(self.decoder)
        except ProtocolError as error:
            self.frames.append(EngineFailure("", str(error)))
        self.notify()

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        self.notify()

    def notify(self) -> None:
        if self.listener is not None:
            self.listener()


class EngineDied(Exception):
    """A process of the engine ended."""


def raise_on_failure(frame: Frame) -> Frame:
    """Return the frame. Raises EngineDied for an EngineFailure, SettingError for one that names a setting."""
    if isinstance(frame, EngineFailure):
        raise (
            SettingError(frame.setting, frame.cause)
            if frame.setting
            else EngineDied(f"engine failed: {frame.cause}")
        )
    return frame


class EngineClient:
    """The engine's processes, one for each rank. Rank 0 takes grants and sends steps. If one process ends,
    all are killed.

    Attributes:
        failure: why a rank above 0 ended.
        asked: who waits for answers to `SetAdapter`, which come in their order.
    """

    def __init__(self, ranks: Sequence[RankProcess]) -> None:
        self.ranks = ranks
        self.metrics = BatchMetrics()
        self.failure: EngineFailure | None = None
        self.asked: deque[asyncio.Future[AdapterAnswer]] = deque()
        self.tasks = [asyncio.create_task(self.kill_with(number)) for number in range(1, len(ranks))]

    @classmethod
    async def start(
        cls, environ: dict[str, str], infos: Sequence[RankInfo], preloaded: Sequence[RankProcess] = ()
    ) -> "EngineClient":
        """Start a process for each rank, or use those that were forked."""
        if not preloaded:
            return cls([await RankProcess.start(environ | info.environ()) for info in infos])
        for rank, info in zip(preloaded, infos, strict=True):
            rank.send(Begin(environ | info.environ()))
        return cls(preloaded)

    async def kill_with(self, number: int) -> None:
        """Kill all ranks when this one ends, with the reason that it gave."""
        while isinstance(frame := await self.ranks[number].receive(), LoadProgress | WorkerCapacity):
            pass  # rank 0 says the same
        self.failure = frame if isinstance(frame, EngineFailure) else await self.wait_for_exit(number)
        self.kill()

    async def wait_for_exit(self, number: int) -> EngineFailure:
        return EngineFailure(
            "", f"the process of rank {number} ended with {await self.ranks[number].process.wait()}"
        )

    async def receive(self) -> Frame:
        """Return rank 0's next frame. Raises EngineDied if no more can come, and SettingError."""
        first = self.ranks[0]
        return raise_on_failure(await first.receive() or self.failure or await self.wait_for_exit(0))

    async def ready(self, progress: Callable[[str], None]) -> WorkerCapacity:
        """Wait for the end of the warm-up → the engine's capacity. `progress` gets lines to log."""
        while True:
            match await self.receive():
                case LoadProgress(text):
                    progress(text)
                case WorkerCapacity() as ready:
                    return ready
                case other:
                    raise EngineDied(f"unexpected frame of the engine: {other}")

    async def sleep(self) -> None:
        """Have the engine, which holds no row, sleep; return when it does. Raises EngineDied."""
        self.ranks[0].send(Sleep())
        while not isinstance(frame := await self.receive(), Asleep):
            self.take_answer(frame)  # or a step that ended no row any more

    def wake_up(self) -> None:
        """Tell a sleeping engine that it is needed; `ready` waits until it is."""
        self.ranks[0].send(WakeUp())

    async def run_steps(self, handle: StepsHandler) -> None:
        """Call `handle` with the steps that come together, in the call that brings them. Never returns;
        raises EngineDied, and what `handle` raises.
        """
        first = self.ranks[0]
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def on_frames() -> None:
            if over.done():
                return
            try:
                self.handle_frames(first.pop_frames(), handle)
                if not first.is_open:
                    over.set_result(None)
            except Exception as error:
                over.set_exception(error)

        first.listener = on_frames
        try:
            on_frames()
            await over
            raise_on_failure(self.failure or await self.wait_for_exit(0))
        except EngineDied:
            self.metrics.on_failure()
            raise
        finally:
            first.listener = None

    def handle_frames(self, frames: Sequence[Frame], handle: StepsHandler) -> None:
        """Call `handle` with the steps among the frames. Raises EngineDied for a frame that is none, and no
        answer.
        """
        if steps := [frame for frame in frames if isinstance(frame, StepResult)]:
            handle(steps)
        for frame in frames:
            if not (isinstance(frame, StepResult) or self.take_answer(frame)):
                raise EngineDied(f"unexpected frame of the engine: {raise_on_failure(frame)}")

    def take_answer(self, frame: Frame) -> bool:
        """Give a frame to who waits for it; False if it is no answer that somebody has asked for."""
        if not (isinstance(frame, AdapterAnswer) and self.asked):
            return False
        asked = self.asked.popleft()
        if not asked.done():
            asked.set_result(frame)
        return True

    async def ask(self, command: SetAdapter) -> AdapterAnswer:
        """Send the engine a command about an adapter, and return its answer, which `run_steps` takes."""
        asked: asyncio.Future[AdapterAnswer] = asyncio.get_running_loop().create_future()
        self.asked.append(asked)
        self.ranks[0].send(command)
        return await asked

    def send(self, plan: Plan) -> None:
        started_s = time.perf_counter()
        self.ranks[0].send(plan)
        self.metrics.on_plan(plan, started_s)

    def run_delay_s(self) -> float:
        """How long the engine's threads have waited for a core since they started."""
        return sum(run_delay_s(rank.process.pid) for rank in self.ranks)

    async def end(self) -> None:
        """Tell ranks of other machines that the worker ends in order, then end those of this one."""
        self.ranks[0].send(End())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_TIMEOUT_S):
                await self.ranks[0].process.wait()
        self.kill()

    def kill(self) -> None:
        for rank in self.ranks:
            rank.kill()
