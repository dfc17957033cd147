"""Served model: the model of a worker, or one of those that it serves in turns, and its engine, which may
sleep. Files and tokenizer are found, the engine becomes ready, its capacity is known.
"""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tokenizers import Tokenizer

from common import model_files
from common.broker.heartbeat import Heartbeat
from common.broker.keys import STARTING
from common.broker.pool_client import PoolClient
from common.messages.plan import WorkerCapacity
from common.model_files import read_other_tokenizer, read_tokenizer
from common.rank import RankInfo
from common.settings.settings import SettingError, Settings
from gpu_worker.agent.engine_client import EngineClient, EngineDied, RankProcess
from gpu_worker.agent.row_text import RowTable
from gpu_worker.agent.state import AgentState
from gpu_worker.swapping.choose import PoolDemand

log = logging.getLogger(__name__)


def resolve(settings: Settings, dtype: str = "") -> Path:
    """The directory of the model. Raises SettingError."""
    weightless, dtype = settings.makes_weights, dtype or settings.dtype
    return model_files.resolve(
        settings.model_id, settings.revision, log.info, weightless=weightless, dtype=dtype
    )


def find_tokenizer(settings: Settings, directory: Path) -> Tokenizer:
    """The tokenizer for the model in a directory. Raises SettingError."""
    found = model_files.find_tokenizer(settings.tokenizer_name, directory, log.info, settings.dtype)
    if settings.tokenizer_name is None:
        return read_tokenizer(found)
    return read_other_tokenizer(found, directory)


async def wait_for_engine(settings: Settings, engine: EngineClient, incarnation: str) -> WorkerCapacity:
    """Wait until the engine is loaded; heartbeats tell meanwhile what it does. Raises SettingError,
    EngineDied.
    """
    doing = "starting"

    def progress(text: str) -> None:
        nonlocal doing
        doing = text
        log.info(text)

    async with PoolClient.connect(settings) as pool:
        heartbeat = Heartbeat(pool, STARTING, incarnation, settings.worker_ttl_s)
        async with heartbeat.sending(settings.heartbeat_s, lambda: {"doing": doing}):
            return await engine.ready(progress)


def capacity(
    settings: Settings, ready: WorkerCapacity, name: str, incarnation: str, directory: Path
) -> WorkerCapacity:
    """Return the capacity that heartbeats carry. Raises SettingError for a limit that leaves no room, or that
    is larger than context and cache allow.
    """
    budget = settings.max_batch_total_tokens
    num_blocks = ready.num_blocks if budget is None else min(ready.num_blocks, budget // ready.block_size)
    if not num_blocks:
        raise SettingError(
            "max_batch_total_tokens", f"{budget} is less than one block of {ready.block_size} tokens"
        )
    longest = min(ready.context, num_blocks * ready.block_size)
    for setting, most in (("max_total_tokens", longest), ("max_input_tokens", longest - (not ready.pooling))):
        if (getattr(settings, setting) or 0) > most:
            cause = f"is more than the {most} tokens that context and KV cache allow"
            raise SettingError(setting, f"{getattr(settings, setting)} {cause}")
    return replace(
        ready,
        incarnation=incarnation,
        name=name,
        model=directory.name,
        model_id=settings.model_id,
        tokenizer_name=settings.tokenizer_name or "",
        num_blocks=num_blocks,
        standby=True,
        served_names=[*(settings.served_model_name or (settings.model_id,))],
    )


UNKNOWN_SWAP_S = 10.0
"""What a first swap to a model is taken to last."""
MEMORY_SHARE = 0.1
"""What a first swap from memory is taken to last, as a share of one from disk."""
FIRST_RETRY_S, LAST_RETRY_S = 10.0, 600.0
SLEEP_TIMEOUT_S = 60.0
MEMORY, DISK = "memory", "disk"


class ServedModel:
    """One model of a worker, and its pool.

    Attributes:
        environ: for the engine's processes, beside settings.
        engine: None while the model is on disk only.
        state: of the last incarnation over this engine: numbers of rows and steps go on.
        kept_in: where the weights of the model are while it sleeps.
        woken_from: where they were before it was woken last.
        swap_ms: what the last swap from memory took, and the last one from disk.
        left_s: monotonic time at which this worker left the pool.
        asked_s: monotonic time since when some requests wait without a break; None while none does.
        retry_s: monotonic time before which it is not woken again, since it has failed to.
    """

    def __init__(
        self, settings: Settings, client: PoolClient, environ: Mapping[str, str], ranks: Sequence[RankInfo]
    ) -> None:
        self.settings = settings
        self.client = client
        self.environ = environ
        self.ranks = ranks
        self.engine: EngineClient | None = None
        self.state: AgentState | None = None
        self.doing = "asleep"
        self.woken_from = DISK
        self.swap_ms: dict[str, float] = {}
        self.left_s = -math.inf
        self.asked_s: float | None = None
        self.retry_s = 0.0
        self.num_failures = 0

    @property
    def pool(self) -> str:
        return self.settings.pool

    @property
    def is_spread(self) -> bool:
        """Whether other machines have ranks of it, too."""
        return len(self.ranks) < self.ranks[0].world_size

    @property
    def kept_in(self) -> str:
        return MEMORY if self.engine else DISK

    @property
    def swap_s(self) -> float:
        """How long the next swap to it takes, as far as is known."""
        from_disk_ms = self.swap_ms.get(DISK, 1000 * UNKNOWN_SWAP_S)
        if self.kept_in == DISK:
            return from_disk_ms / 1000
        return self.swap_ms.get(MEMORY, from_disk_ms * MEMORY_SHARE) / 1000

    def describe(self) -> dict[str, str | int]:
        """The fields of its heartbeat, by which gateways find the model while it sleeps."""
        return {
            "state": self.doing,
            "kept_in": self.kept_in,
            "swap_ms": round(self.swap_ms.get(self.kept_in, 0.0)),
            "model_id": self.settings.model_id,
            "tokenizer_name": self.settings.tokenizer_name or "",
        }

    def complete(self, demand: PoolDemand) -> PoolDemand:
        """The demand, with what this worker knows of its own time here."""
        now_s = time.monotonic()
        if not demand.num_waiting or self.doing == "awake":
            self.asked_s = None
        elif self.asked_s is None:
            self.asked_s = max(now_s - demand.waited_s, self.left_s)
        waited_s = 0.0 if self.asked_s is None else now_s - self.asked_s
        return replace(demand, waited_s=waited_s, swap_s=self.swap_s, can_wake=now_s >= self.retry_s)

    async def wake(
        self, name: str, incarnation: str, preloaded: Sequence[RankProcess]
    ) -> tuple[EngineClient, WorkerCapacity]:
        """Wake the engine, or start one → what it holds. Raises EngineDied, SettingError."""
        self.woken_from, started_s = self.kept_in, time.monotonic()
        self.doing = "waking"
        try:
            # ranks of other machines wait for these: they all find the model once they are connected
            directory = None if self.is_spread else await asyncio.to_thread(resolve, self.settings)
            engine = self.engine = self.engine or await self.start(directory, preloaded)
            if self.woken_from == MEMORY:
                engine.wake_up()
            if directory:
                await self.read_tokenizer(directory)
            ready = await wait_for_engine(self.settings, engine, incarnation)
            directory = directory or resolve(self.settings, ready.dtype)
            worker = capacity(self.settings, ready, name, incarnation, directory)
            await self.read_tokenizer(directory)
        except BaseException:
            self.end()
            raise
        self.swap_ms[self.woken_from] = 1000 * (time.monotonic() - started_s)
        self.doing = "awake"
        self.num_failures = 0
        return engine, worker

    async def start(self, directory: Path | None, preloaded: Sequence[RankProcess]) -> EngineClient:
        found = {"model_id": str(directory)} if directory else {}
        settings = self.settings.model_copy(update=found)
        return await EngineClient.start({**settings.environ(), **self.environ}, self.ranks, preloaded)

    async def read_tokenizer(self, directory: Path) -> None:
        """Make the state of the first incarnation over an engine, if there is none yet."""
        if self.state is None:
            tokenizer = await asyncio.to_thread(find_tokenizer, self.settings, directory)
            self.state = AgentState(RowTable(tokenizer))

    async def sleep(self) -> None:
        """Have the engine, which holds no row, sleep; several ranks end instead."""
        self.doing = "asleep"
        if self.engine is None:
            return
        if len(self.ranks) == 1:
            with contextlib.suppress(EngineDied):
                async with asyncio.timeout(SLEEP_TIMEOUT_S):
                    await self.engine.sleep()
                return
        self.end()

    def end(self) -> None:
        """End the engine, if there is one: the model is on disk only."""
        self.doing = "asleep"
        if self.engine is not None:
            self.engine.kill()
        self.engine = None
        self.state = None

    def note_failure(self, error: Exception) -> None:
        """The model cannot be woken; it is tried again later, and later each time."""
        pause_s = min(FIRST_RETRY_S * 2**self.num_failures, LAST_RETRY_S)
        self.num_failures += 1
        self.retry_s = time.monotonic() + pause_s
        log.error("%s cannot be woken, and is tried again in %.0f s: %s", self.pool, pause_s, error)

    def weight_bytes(self) -> int:
        """Size of the weights on disk, which is about what they take in memory; 0 if that is not known."""
        path = model_files.find_local(self.settings.model_id, self.settings.revision, self.settings.dtype)
        return sum(file.stat().st_size for file in model_files.weight_files(path)) if path else 0
