"""A worker process whose engine answers as a script says: the real agent, with room for the prompts of coding
agents. The launcher runs it in place of `gpu_worker`.
"""

import asyncio
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import uvloop

from common.broker.pool_client import PoolClient
from common.messages.plan import Plan, WorkerCapacity
from common.messages.records import pack_ids, unpack_ids
from common.process.startup import ProcessIdentity, configure_process, exit_when_unservable, start_process
from common.settings.settings import Settings
from gpu_worker.agent.agent import Agent
from gpu_worker.agent.state import AgentState
from gpu_worker.engine.batch.row import RowSlice
from gpu_worker.swapping.swapper import capacity, find_tokenizer, resolve
from tests.support.chaos.engine import BLOCK_SIZE
from tests.support.coding_agents.script import ASIDE, ScriptFolder
from tests.support.fleet.modeless_worker import ModelessEngine
from tests.support.tokenizer import TOKENIZER, ids

SCRIPT_VARIABLE = "AGENT_SCRIPT"
EOS = 2
STEP_S = 0.002
HELD_INDEX = 2
"""So many tokens of a turn are published before a process is killed."""
READY = WorkerCapacity(
    *("", "", "scripted", "float32", BLOCK_SIZE, 20_000, 4096, 200_000, pack_ids([EOS])),
    device="cpu",
    token_ms=1.0,
    prefix_caching=True,
)


class AnsweringEngine(ModelessEngine):
    """An engine that answers as a script says.

    Attributes:
        answers: the ids of each row's answer, with the end.
        turns: of each row that answers in the task.
        num_prompt: tokens of each row's prompt.
    """

    def __init__(self, folder: ScriptFolder, name: str) -> None:
        super().__init__(STEP_S, eos_ids=(EOS,))
        self.folder, self.name = folder, name
        self.answers: dict[int, list[int]] = {}
        self.turns: dict[int, int] = {}
        self.num_prompt: dict[int, int] = {}

    def send(self, plan: Plan) -> None:
        script = self.folder.read()
        for start in plan.starts:
            row_ids = unpack_ids(start.ids)
            self.num_prompt[start.row] = len(row_ids) - start.base
            prompt = TOKENIZER.decode(row_ids[: self.num_prompt[start.row]], skip_special_tokens=False)
            turn = script.turn(prompt)
            text = ASIDE if turn is None else script.answers[turn]
            self.answers[start.row] = [*ids(text), EOS]
            if turn is not None:
                self.turns[start.row] = turn
        starts = [
            replace(start, request=replace(start.request, sampling=None))  # a grammar needs a vocabulary
            for start in plan.starts
        ]
        super().send(replace(plan, starts=starts))

    def sample(self, one: RowSlice) -> list[int]:
        row = one.row.number
        answer = self.answers[row]
        token = answer[min(self.index(row), len(answer) - 1)]
        self.ids[row] += pack_ids([token])
        return [token]

    def index(self, row: int) -> int:
        """The index of a row's next token."""
        return len(self.ids[row]) // 4 - self.num_prompt[row]

    async def pause(self) -> None:
        """Wait while a turn waits for its strike, too."""
        await super().pause()
        while held := [turn for row, turn in self.turns.items() if self.is_held(row, turn)]:
            for turn in held:
                self.folder.reach(turn, self.name)
            await super().pause()

    def is_held(self, row: int, turn: int) -> bool:
        return row in self.rows.rows and self.index(row) >= HELD_INDEX and not self.folder.is_released(turn)


async def run(settings: Settings, own: ProcessIdentity) -> int:
    configure_process(own, settings)
    directory = resolve(settings, READY.dtype)
    engine = AnsweringEngine(ScriptFolder(Path(os.environ[SCRIPT_VARIABLE])), own.name)
    worker = capacity(settings, READY, own.name, own.incarnation, directory)
    state = AgentState(find_tokenizer(settings, directory))

    def end() -> None:
        state.signalled.set()
        state.draining.set()

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, end)
    await Agent(settings, PoolClient.connect(settings), engine, state, worker).serve()
    return 0


if __name__ == "__main__":
    identity = start_process("worker", "w0")
    with exit_when_unservable():
        sys.exit(uvloop.run(run(Settings.read([]), identity)))
