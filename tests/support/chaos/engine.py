"""The one engine without a model, with the real engine's rows: as a process (`python -m
tests.support.chaos.engine N`), or under an agent in a test's own process
(tests/support/fleet/modeless_worker.py).

Each id is a function of all ids before it, and of seed and choice: a row that resumes with a token too few or
too many goes on with other ids. So does one that starts with blocks in which other ids were computed, or
whose blocks another row fills. An adapter gives other ids, too.

With SPECULATE rows propose what they will sample, and sometimes other ids.
"""

import contextlib
import json
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from zlib import crc32

import setproctitle

from common.messages.plan import NewRow, Plan, WorkerCapacity
from common.messages.records import pack_ids, unpack_ids
from common.process.launch import die_with_parent
from common.settings.settings import Settings
from gpu_worker.engine.batch.row import NEVER, Adapter, RowSlice, confirmed
from gpu_worker.engine.batch.rows import Rows
from gpu_worker.engine.batch.step_result import StepSamples
from gpu_worker.engine.drafting.proposers import Proposer
from gpu_worker.protocol import (
    AdapterAnswer,
    AgentLink,
    Asleep,
    LoadProgress,
    ModelSleeps,
    PeerClosed,
    SetAdapter,
    StepResult,
    WakeUp,
)

STEP_MS = "CHAOS_STEP_MS"
"""Variable: duration of a step."""
TOKEN_US = "CHAOS_TOKEN_US"
"""Variable: microseconds that each prompt token adds to its step, which then computes up to 1,024."""
WAKE_MS = "CHAOS_WAKE_MS"
"""Variable: how long an engine takes to load, and to wake."""
BLOCKS = "CHAOS_NUM_BLOCKS"
"""Variable: number of KV blocks, in place of the default."""
BLOCK_SIZE, NUM_BLOCKS, CONTEXT = 16, 8192, 2048
MAX_BATCH_PREFILL_TOKENS = 256
MAX_LORAS, MAX_LORA_RANK = 4, 64
FIRST_ID, NUM_IDS = 1_000, 1_000
KEEPALIVE_S = 5.0


class ScriptedEngine:
    """An engine without a model.

    Attributes:
        chains: checksum of seed, choice and ids of each row.
        ids: packed ids of each row.
        contents: checksum of the ids that were computed up to the end of a block, of full blocks.
        num_starts: rows that ever started; `last_row`: the newest; `most_rows`: in one step.
    """

    def __init__(
        self, step_s: float, num_speculated: int = 0, eos_ids: Sequence[int] = (), prefix_caching: bool = True
    ) -> None:
        self.step_s = step_s
        self.token_s = float(os.environ.get(TOKEN_US, 0)) / 1e6
        self.num_speculated = num_speculated
        self.adapters: dict[str, Adapter] = {}
        self.rows = Rows(BLOCK_SIZE, eos_ids, prefix_caching=prefix_caching, adapters=self.adapters)
        self.chains: dict[int, int] = {}
        self.ids: dict[int, bytes] = {}
        self.contents: dict[int, int] = {}
        self.num_starts = self.most_rows = self.last_row = 0

    def apply(self, grant: Plan) -> None:
        granted = self.rows.apply(grant)
        for block in (number for blocks in granted for number in blocks.tolist()):
            self.contents.pop(block, None)
        for start in grant.starts:
            assert start.row > self.last_row, "row numbers go on"
            self.last_row = start.row
            self.num_starts += 1
            cached = unpack_ids(start.blocks)[: start.num_cached // BLOCK_SIZE]
            wrong = any(self.holds_others(block, start.ids, place) for place, block in enumerate(cached))
            self.chains[start.row] = first_chain(start) ^ wrong
            self.ids[start.row] = start.ids
            if self.num_speculated and start.row in self.rows.rows:
                row = self.rows.rows[start.row]
                row.proposer, row.goes_on_from = self.proposer_of(start), NEVER

    def proposer_of(self, start: NewRow) -> Proposer:
        return Guesser(self, start.row)

    def holds_others(self, block: int, ids: bytes, place: int) -> bool:
        """Whether other ids than a row's were computed up to the end of its block at this place."""
        return self.contents.get(block) != checksum(ids, place)

    def fill_blocks(self, slices: Sequence[RowSlice]) -> None:
        for one in slices:
            ids, blocks = self.ids[one.row.number] + pack_ids(one.proposed), one.row.blocks.tolist()
            for place in range(one.begin // BLOCK_SIZE, one.kv_len // BLOCK_SIZE):
                wrong = place > 0 and self.holds_others(blocks[place - 1], ids, place - 1)
                self.chains[one.row.number] ^= wrong
                self.contents[blocks[place]] = checksum(ids, place)

    def obey(self, command: SetAdapter) -> AdapterAnswer:
        """Load or unload an adapter. A folder without an `adapter_config.json` is refused, and so is a rank
        that is too large.
        """
        if not command.path:
            self.adapters.pop(command.name, None)
            return AdapterAnswer(command.name)
        path = Path(command.path)
        try:
            rank = json.loads((path / "adapter_config.json").read_text())["r"]
        except FileNotFoundError:
            return AdapterAnswer(command.name, f"{path} has no adapter_config.json")
        if rank > MAX_LORA_RANK:
            return AdapterAnswer(command.name, f"its rank is {rank}; MAX_LORA_RANK is {MAX_LORA_RANK}")
        self.adapters[command.name] = Adapter(command.name)
        return AdapterAnswer(command.name)

    def step(self) -> StepResult | None:
        slices = self.rows.launch()
        self.most_rows = max(self.most_rows, len(slices))
        num_prompt = sum(one.kv_len - one.begin for one in slices if not one.decodes)
        duration_s = self.step_s + self.token_s * num_prompt
        if slices:
            self.compute(duration_s)
            self.fill_blocks(slices)
            self.rows.collect(slices, self.forward(slices))
        result = self.rows.take_result()
        self.chains = {row: chain for row, chain in self.chains.items() if row in self.rows.rows}
        self.ids = {row: ids for row, ids in self.ids.items() if row in self.rows.rows}
        result.step, result.duration_ms = self.rows.step, duration_s * 1e3
        return None if not slices and result.is_empty else result

    def compute(self, duration_s: float) -> None:
        """Take the time of a step."""
        time.sleep(duration_s)

    def forward(self, slices: Sequence[RowSlice]) -> StepSamples:
        ids = [token for one in slices if one.samples for token in self.sample(one)]
        return StepSamples(ids, [-0.5] * len(ids))

    def sample(self, one: RowSlice) -> list[int]:
        """Sample for a slice, and after its proposals, too. The row goes on with what is confirmed. A
        prefill's ids are in its chain already.
        """
        row = one.row.number
        chain = extend(self.chains[row], one.row.last_id) if one.decodes else self.chains[row]
        chains = [*accumulate(one.proposed, extend, initial=chain)]
        sampled = [*map(id_of, chains)]
        tokens = confirmed(sampled, one.proposed)
        self.chains[row] = chains[len(tokens) - 1]
        self.ids[row] += pack_ids(tokens)
        return sampled


class Guesser(Proposer):
    """Proposes what a row of the scripted engine will sample; each fifth time the last of them is wrong."""

    waits = False
    method = "ngram"

    def __init__(self, engine: ScriptedEngine, row: int) -> None:
        self.is_sure = False
        self.engine = engine
        self.row = row
        self.num_tokens = 0

    def propose(self, most: int, skipped: int = 0) -> list[int]:
        chain, last_id = self.engine.chains[self.row], unpack_ids(self.engine.ids[self.row][-4:])[0]
        proposed: list[int] = []
        for _ in range(min(most, self.engine.num_speculated, self.num_tokens % 7)):
            chain = extend(chain, last_id)
            last_id = id_of(chain)
            proposed.append(last_id)
        wrong = self.num_tokens % 5 == 0
        return [*proposed[:-1], *(token + wrong for token in proposed[-1:])]

    def learn(self, tokens: Sequence[int], num_proposed: int) -> None:
        self.num_tokens += len(tokens)


def extend(chain: int, token: int) -> int:
    """Return the chain after one more token."""
    return crc32(struct.pack("<i", token), chain)


def id_of(chain: int) -> int:
    """Return the id that is sampled after the ids of a chain."""
    return FIRST_ID + chain % NUM_IDS


def generate(prompt: Sequence[int], count: int) -> list[int]:
    """Return the ids of a greedy request that nothing interrupts."""
    chains = accumulate(
        range(count - 1), lambda chain, _: extend(chain, id_of(chain)), initial=crc32(pack_ids(prompt))
    )
    return [*map(id_of, chains)]


def checksum(ids: bytes, place: int) -> int:
    """Return the checksum of the ids up to the end of a row's block."""
    return crc32(ids[: 4 * BLOCK_SIZE * (place + 1)])


def first_chain(start: NewRow) -> int:
    sampling, adapter = start.request.sampling, crc32(start.request.adapter.encode())
    seed = crc32(struct.pack("<qi", sampling.seed, sampling.choice)) if sampling else 0
    return crc32(start.ids, seed ^ adapter)


def run(engine: ScriptedEngine, link: AgentLink, ready: WorkerCapacity, wake_s: float) -> None:
    """Run steps, and sleep when told to, until the agent closes the socket (raises PeerClosed): what
    gpu_worker/engine/loop.py does, without torch.
    """
    while True:
        with contextlib.suppress(ModelSleeps):
            run_steps(engine, link)
        assert not engine.rows.rows
        link.send(Asleep())
        link.receive(WakeUp)
        time.sleep(wake_s)
        link.send(ready)


def run_steps(engine: ScriptedEngine, link: AgentLink) -> None:
    wait_s = 0.0
    while True:
        for command in link.commands(wait_s):
            if isinstance(command, Plan):
                engine.apply(command)
            else:
                link.send(engine.obey(command))
        step = engine.step()
        if step is not None:
            link.send(step)
        elif wait_s and engine.rows.rows:
            link.send(StepResult(engine.rows.step))
        wait_s = 0.0 if step else KEEPALIVE_S


def main() -> None:
    die_with_parent()
    setproctitle.setproctitle(f"tokenfleet engine {os.environ.get('WORKER_NAME', 'w0')}")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    link = AgentLink(socket.socket(fileno=int(sys.argv[1])))
    ready = WorkerCapacity(
        "",
        "",
        os.environ["MODEL_ID"],
        "float32",
        BLOCK_SIZE,
        int(os.environ.get(BLOCKS, NUM_BLOCKS)),
        1024 if TOKEN_US in os.environ else MAX_BATCH_PREFILL_TOKENS,
        CONTEXT,
        device="cpu",
        token_ms=0.01,
        prefix_caching=True,
        max_loras=MAX_LORAS,
        max_lora_rank=MAX_LORA_RANK,
    )
    with contextlib.suppress(PeerClosed):
        link.send(LoadProgress("there is no model to load"))
        wake_s = float(os.environ.get(WAKE_MS, 0)) / 1e3
        time.sleep(wake_s)
        link.send(ready)
        speculate = Settings.read([], os.environ).speculate
        run(ScriptedEngine(float(os.environ[STEP_MS]) / 1e3, speculate), link, ready, wake_s)


if __name__ == "__main__":
    main()
