"""Engine process without a model: `python -m tests.support.chaos.engine --fd N`.

Its rows are the real engine's. Each id is a function of all ids before it, and of seed and choice: a row that
resumes with a token too few or too many goes on with other ids, and so does one that starts with blocks in
which other ids were computed. An adapter gives other ids, too.

With SPECULATE rows propose what they will sample, and sometimes other ids.
"""

import argparse
import contextlib
import os
import signal
import socket
import struct
import time
from collections.abc import Sequence
from itertools import accumulate
from zlib import crc32

import setproctitle

from common.messages.records import pack_ids, unpack_ids
from common.process.launch import die_with_parent
from common.settings.settings import Settings
from gpu_worker.engine.agent_link import AgentLink
from gpu_worker.engine.batch.row import RowSlice, confirmed
from gpu_worker.engine.batch.rows import Rows
from gpu_worker.protocol import Grant, LoadProgress, PeerClosed, Ready, StartRow, StepResult
from tests.support.adapters.scripted import MAX_CPU_LORAS, MAX_LORA_RANK, MAX_LORAS, ScriptedAdapters
from tests.support.chaos.engine_loop import run

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
FIRST_ID, NUM_IDS = 1_000, 1_000


class ScriptedEngine:
    """An engine without a model, with the interface that the engine's loop needs.

    Attributes:
        chains: checksum of seed, choice and ids of each row.
        ids: packed ids of each row.
        contents: checksum of the ids that were computed up to the end of a block, of full blocks.
    """

    def __init__(self, step_s: float, num_speculated: int = 0) -> None:
        self.step_s = step_s
        self.token_s = float(os.environ.get(TOKEN_US, 0)) / 1e6
        self.num_speculated = num_speculated
        self.adapters = ScriptedAdapters()
        self.rows = Rows(BLOCK_SIZE, eos_ids=(), prefix_caching=True, adapters=self.adapters.loaded)
        self.chains: dict[int, int] = {}
        self.ids: dict[int, bytes] = {}
        self.contents: dict[int, int] = {}

    def apply(self, grant: Grant) -> None:
        granted = self.rows.apply(grant)
        for block in (number for blocks in granted for number in blocks.tolist()):
            self.contents.pop(block, None)
        for start in grant.starts:
            self.chains[start.row] = first_chain(start) ^ self.check_cached(start)
            self.ids[start.row] = start.ids
            if self.num_speculated and start.row in self.rows.rows:
                self.rows.rows[start.row].proposer = Guesser(self, start.row)

    def check_cached(self, start: StartRow) -> int:
        """Return 0 if the blocks with which a row starts hold the right ids."""
        cached = unpack_ids(start.blocks)[: start.num_cached // BLOCK_SIZE]
        return any(
            self.contents.get(block) != checksum(start.ids, place) for place, block in enumerate(cached)
        )

    def fill_blocks(self, slices: Sequence[RowSlice]) -> None:
        for one in slices:
            ids = self.ids[one.row.number] + pack_ids(one.proposed)
            for place in range(one.begin // BLOCK_SIZE, one.kv_len // BLOCK_SIZE):
                self.contents[int(one.row.blocks[place])] = checksum(ids, place)

    def slack_s(self) -> float:
        """A step is launched when the one before it is read."""
        return 0.0

    def step(self) -> StepResult | None:
        slices = self.rows.launch()
        duration_s = self.step_s + self.token_s * sum(
            one.kv_len - one.begin for one in slices if not one.decodes
        )
        if slices:
            time.sleep(duration_s)
            self.fill_blocks(slices)
            ids = [token for one in slices if one.samples for token in self.sample(one)]
            self.rows.collect(slices, ids, [-0.5] * len(ids))
        result = self.rows.take_result()
        self.chains = {row: chain for row, chain in self.chains.items() if row in self.rows.rows}
        self.ids = {row: ids for row, ids in self.ids.items() if row in self.rows.rows}
        return result.build(self.rows.step, duration_s * 1e3) if slices or result else None

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


class Guesser:
    """Proposes what a row of the scripted engine will sample; each fifth time the last of them is wrong."""

    is_sure = False
    waits = False
    method = "ngram"

    def __init__(self, engine: ScriptedEngine, row: int) -> None:
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


def checksum(ids: bytes, place: int) -> int:
    """Return the checksum of the ids up to the end of a row's block."""
    return crc32(ids[: 4 * BLOCK_SIZE * (place + 1)])


def first_chain(start: StartRow) -> int:
    sampling, adapter = start.sampling, crc32(start.adapter.encode())
    seed = crc32(struct.pack("<qi", sampling.seed, sampling.choice)) if sampling else 0
    return crc32(start.ids, seed ^ adapter)


def main() -> None:
    die_with_parent()
    setproctitle.setproctitle(f"tokenfleet engine {os.environ.get('WORKER_NAME', 'w0')}")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    link = AgentLink(socket.socket(fileno=parser.parse_args().fd))
    ready = Ready(
        os.environ["MODEL_ID"],
        "float32",
        "cpu",
        BLOCK_SIZE,
        int(os.environ.get(BLOCKS, NUM_BLOCKS)),
        1024 if TOKEN_US in os.environ else MAX_BATCH_PREFILL_TOKENS,
        CONTEXT,
        eos_ids=b"",
        token_ms=0.01,
        prefix_caching=True,
        max_loras=MAX_LORAS,
        max_lora_rank=MAX_LORA_RANK,
        max_cpu_loras=MAX_CPU_LORAS,
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
