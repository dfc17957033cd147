"""The worker process: starts the engine, runs the agent, and seals its own logs when it ends.

A preloaded worker process, and its engine's processes, have imported everything and perhaps loaded the model.
It waits until the launcher says which worker it becomes.
"""

import asyncio
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import setproctitle
import uvloop
from tokenizers import Tokenizer

from common import model_files
from common.broker import worker_scripts
from common.broker.client import ERRORS, describe_error
from common.broker.heartbeat import Heartbeat
from common.broker.keys import STARTING
from common.broker.pool_client import PoolClient
from common.messages.plan import WorkerCapacity
from common.metrics.aggregate import publishing_metrics
from common.model_config import read_other_tokenizer, read_tokenizer
from common.process import parent_death
from common.process.preload import ACCEPTED, PRELOAD_FLAG, READY, detach_stdin
from common.rank import RankInfo, machine_ranks
from common.settings.settings import SettingError, Settings
from common.startup import ProcessIdentity, configure_process, exit_when_unservable, start_process
from gpu_worker.agent import gpu_claims
from gpu_worker.agent.agent import Agent
from gpu_worker.agent.engine_client import EngineClient, EngineDied, RankProcess
from gpu_worker.agent.publish import Sealed
from gpu_worker.agent.row_text import RowTable
from gpu_worker.agent.state import AgentState
from gpu_worker.agent.watchdog import EngineStuck
from gpu_worker.follower import configure_follower, follow
from gpu_worker.protocol import LoadProgress, Ready

log = logging.getLogger(__name__)

SEAL_TIMEOUT_S = 2.0


async def wait_for_place(num_ranks: int, flags: Sequence[str]) -> list[RankProcess]:
    """Start the processes of `num_ranks` ranks with these flags; return them once this process has its place
    in the fleet, with its variables in the environment. Exits if the launcher or a rank ends before.
    """
    launcher = socket.socket(fileno=os.dup(sys.stdin.fileno()))
    reader, writer = await asyncio.open_unix_connection(sock=launcher)
    ranks = [await RankProcess.start({}, flags) for _ in range(num_ranks)]
    for rank in ranks:
        if not isinstance(frame := await rank.link.receive(), LoadProgress):
            sys.exit(f"an engine cannot be preloaded: {frame}")
    setproctitle.setproctitle("tokenfleet preloaded")
    writer.write(READY)
    line = await first_line(reader, ranks)
    if not line:
        sys.exit(0)
    os.environ.update(json.loads(line))
    writer.write(ACCEPTED)
    await writer.drain()
    writer.close()
    detach_stdin()
    return ranks


async def first_line(reader: asyncio.StreamReader, ranks: list[RankProcess]) -> bytes:
    """Return the launcher's line; empty if the launcher or a rank has ended."""
    line = asyncio.create_task(reader.readline())
    ends = [asyncio.create_task(rank.process.wait()) for rank in ranks]
    await asyncio.wait([line, *ends], return_when=asyncio.FIRST_COMPLETED)
    for end in ends:
        end.cancel()
    return line.result() if line.done() else b""


def own_ranks(settings: Settings) -> list[RankInfo]:
    """The ranks that this process starts: the one that a launcher has made it, or all of this machine. Raises
    SettingError.
    """
    launched = RankInfo.read(os.environ)
    if launched.world_size == 1:
        return machine_ranks(settings, gpu_claims.num_ranks(settings))
    if launched.world_size != (settings.num_ranks if settings.num_shard else launched.world_size):
        cause = f"{settings.num_ranks} ranks, but {launched.world_size} ranks were started"
        raise SettingError("num_shard", f"{cause} (by torchrun, MPI or Slurm)")
    return [launched]


async def run(settings: Settings, own: ProcessIdentity, preloaded: Sequence[RankProcess] = ()) -> int:
    """Run this worker's processes of this machine, some of which may be preloaded → the exit status."""
    ranks = own_ranks(settings)
    environ = {"WORKER_NAME": own.name, "WORKER_INCARNATION": own.incarnation}
    if RankInfo.read(os.environ).world_size == 1 and (gpus := gpu_claims.claim(settings, len(ranks))):
        environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)  # torchrun has chosen the GPUs of its ranks
    if ranks[0].rank:
        configure_follower(own, settings)
        return await follow(settings, environ, ranks, preloaded)
    configure_process(own, settings)
    return await serve(settings, own, environ, ranks, preloaded)


def resolve(settings: Settings, dtype: str) -> Path:
    """The directory of the model. Raises SettingError."""
    return model_files.resolve(
        settings.model_id, settings.revision, log.info, weightless=settings.makes_weights, dtype=dtype
    )


async def serve(
    settings: Settings,
    own: ProcessIdentity,
    environ: Mapping[str, str],
    ranks: Sequence[RankInfo],
    preloaded: Sequence[RankProcess],
) -> int:
    """Serve as one incarnation → the exit status. `environ`: for the engine's processes, beside settings."""
    # other machines wait for these ranks: they all find the model once they are connected
    is_spread = len(ranks) < ranks[0].world_size
    directory = None if is_spread else resolve(settings, settings.dtype)
    found = settings.model_copy(update={"model_id": str(directory)}) if directory else settings
    engine = await EngineClient.start({**found.environ(), **environ}, ranks, preloaded)
    try:
        table = RowTable(find_tokenizer(settings, directory)) if directory else None
        ready = await wait_for_engine(settings, engine, own.incarnation)
        directory = directory or resolve(settings, ready.dtype)
        table = table or RowTable(find_tokenizer(settings, directory))
        worker = capacity(settings, ready, own.name, own.incarnation, directory)
        status = await serve_engine(settings, engine, table, worker)
        if is_spread and status == 0:
            await engine.end()
        return status
    except EngineDied as error:
        log.error("%s", error)
        return 1
    finally:
        engine.kill()


def find_tokenizer(settings: Settings, directory: Path) -> Tokenizer:
    """The tokenizer for the model in a directory. Raises SettingError."""
    found = model_files.find_tokenizer(settings.tokenizer_name, directory, log.info, settings.dtype)
    if settings.tokenizer_name is None:
        return read_tokenizer(found)
    return read_other_tokenizer(found, directory)


async def wait_for_engine(settings: Settings, engine: EngineClient, incarnation: str) -> Ready:
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


async def serve_engine(
    settings: Settings, engine: EngineClient, table: RowTable, worker: WorkerCapacity
) -> int:
    """Run the agent until it is drained or fails → the exit status. If its streams are gone, it goes on as
    the next incarnation.
    """
    pool = PoolClient.connect(settings)
    state = AgentState(table)
    agent = Agent(settings, pool, engine, state, worker)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, state.begin_shutdown)
    loop.add_signal_handler(signal.SIGINT, state.begin_shutdown)
    why = "died"
    try:
        async with publishing_metrics(pool):
            while not await agent.run():
                agent = await agent.next_incarnation()
                log.warning("the same engine goes on as incarnation %s", agent.worker.incarnation)
        why = "drained"
        return 0
    except (Sealed, EngineDied, EngineStuck) as error:
        log.error("incarnation %s is over: %s: %s", agent.worker.incarnation, type(error).__name__, error)
        return 1
    finally:
        await seal(pool, agent.worker.incarnation, why)


def capacity(
    settings: Settings, ready: Ready, name: str, incarnation: str, directory: Path
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
    for setting, most in (("max_total_tokens", longest), ("max_input_tokens", longest - 1)):
        if (getattr(settings, setting) or 0) > most:
            cause = f"is more than the {most} tokens that context and KV cache allow"
            raise SettingError(setting, f"{getattr(settings, setting)} {cause}")
    return WorkerCapacity(
        incarnation=incarnation,
        name=name,
        model=directory.name,
        model_id=settings.model_id,
        tokenizer_name=settings.tokenizer_name or "",
        dtype=ready.dtype,
        block_size=ready.block_size,
        num_blocks=num_blocks,
        max_batch_prefill_tokens=ready.max_batch_prefill_tokens,
        context=ready.context,
        eos_ids=ready.eos_ids,
        world_size=ready.world_size,
        device=ready.device,
        prefix_caching=ready.prefix_caching,
        standby=True,
        vocab_size=ready.vocab_size,
    )


async def seal(pool: PoolClient, incarnation: str, why: str) -> None:
    """Seal the incarnation's logs, so that batcher and gateways learn at once that it has ended."""
    try:
        async with asyncio.timeout(SEAL_TIMEOUT_S):
            await pool.run(worker_scripts.seal(pool.keys, incarnation, why=why))
    except (*ERRORS, TimeoutError) as error:
        log.warning("not sealed: %s", describe_error(error))


async def serve_preloaded(flags: Sequence[str]) -> int:
    """Wait for a place in the fleet, then serve there → the exit status."""
    parent_death.die_with_parent()
    setproctitle.setproctitle("tokenfleet preloading")
    ranks = await wait_for_place(len(own_ranks(Settings.read([]))), flags)
    identity = start_process("worker", "w0")
    return await run(Settings.read([]), identity, ranks)


def main() -> None:
    """Run a worker, preloaded with `--preload`; on a machine without its rank 0 only the ranks there."""
    if sys.argv[1:2] == [PRELOAD_FLAG]:
        with exit_when_unservable():
            sys.exit(uvloop.run(serve_preloaded(sys.argv[1:])))
    identity = start_process("worker", "w0")
    with exit_when_unservable():
        sys.exit(uvloop.run(run(Settings.read([]), identity)))
