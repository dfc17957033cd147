"""One worker process: starts its engine, serves as its agent, and seals its own logs when it ends."""

import asyncio
import logging
import os
import signal
import sys
from pathlib import Path

import uvloop
from redis.asyncio import Redis
from tokenizers import Tokenizer

from common import model_files
from common.broker import client
from common.broker.client import ERRORS, describe_error, script
from common.broker.keys import Keys
from common.messages.plan import WorkerCapacity
from common.metrics.aggregate import publishing_metrics
from common.process.heartbeat import Heartbeat
from common.process.startup import configure_process, start_process
from common.settings.settings import SettingError, Settings, exit_when_unservable
from gpu_worker.agent import gpu_claims
from gpu_worker.agent.agent import Agent
from gpu_worker.agent.engine_client import EngineClient, EngineDied, EngineRefused
from gpu_worker.agent.publish import Sealed
from gpu_worker.agent.row_text import RowTable
from gpu_worker.agent.watchdog import EngineStuck
from gpu_worker.protocol import Ready
from gpu_worker.rank import Place, local_places

log = logging.getLogger(__name__)

SEAL_TIMEOUT_S = 2.0


async def serve(settings: Settings, name: str, incarnation: str) -> int:
    """Serves as one incarnation. Returns the exit status."""
    directory = model_files.resolve(
        settings.model_id,
        settings.revision,
        log.info,
        weightless=settings.makes_weights,
        dtype=settings.dtype,
    )
    given = Place.read(os.environ)
    places = [given] if given.world_size > 1 else local_places(gpu_claims.num_ranks(settings))
    held = (
        gpu_claims.claim(settings, len(places)) if given.world_size == 1 else {}
    )  # torchrun's ranks take those that they are given
    devices = {"CUDA_VISIBLE_DEVICES": ",".join(held)} if held else {}
    engine = await EngineClient.start(
        {**settings.environ(), **devices, "MODEL_ID": str(directory), "WORKER_NAME": name}, places
    )
    try:
        table = RowTable(Tokenizer.from_file(str(directory / "tokenizer.json")))
        ready = await loaded(settings, engine, incarnation)
        return await serve_engine(
            settings, engine, table, capacity(settings, ready, name, incarnation, directory)
        )
    except EngineRefused as error:
        raise SettingError(error.setting, error.cause) from error
    except EngineDied as error:
        log.error("%s", error)
        return 1
    finally:
        engine.kill()


async def loaded(settings: Settings, engine: EngineClient, incarnation: str) -> Ready:
    """Waits for the engine; a heartbeat says meanwhile what it is doing. Raises EngineRefused, EngineDied."""
    doing = "starting"

    def progress(text: str) -> None:
        nonlocal doing
        doing = text
        log.info(text)

    async with client.connect(client.broker_url(settings)) as redis:
        sign = Heartbeat(redis, Keys(settings.pool), "starting", incarnation, settings.worker_ttl_s)
        async with sign.sending(settings.heartbeat_s, lambda: {"doing": doing}):
            return await engine.ready(progress)


async def serve_engine(
    settings: Settings, engine: EngineClient, table: RowTable, worker: WorkerCapacity
) -> int:
    redis = client.connect(client.broker_url(settings))
    agent = Agent(settings, redis, engine, table, worker)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, agent.draining.set)
    loop.add_signal_handler(signal.SIGINT, agent.draining.set)
    try:
        async with publishing_metrics(redis, agent.keys):
            await agent.run()
        return 0
    except (Sealed, EngineDied, EngineStuck) as error:
        log.error("incarnation %s is over: %s: %s", worker.incarnation, type(error).__name__, error)
        return 1
    finally:
        await seal(redis, Keys(settings.pool), worker.incarnation)


def capacity(
    settings: Settings, ready: Ready, name: str, incarnation: str, directory: Path
) -> WorkerCapacity:
    """What is announced. Raises SettingError for a limit that leaves no room, or that asks for more room than
    there is.
    """
    budget = settings.max_batch_total_tokens
    num_blocks = ready.num_blocks if budget is None else min(ready.num_blocks, budget // ready.block_size)
    if not num_blocks:
        raise SettingError(
            "max_batch_total_tokens", f"{budget} is less than one block of {ready.block_size} tokens"
        )
    longest = min(ready.context, num_blocks * ready.block_size)
    for setting in ("max_total_tokens", "max_input_tokens"):
        if (getattr(settings, setting) or 0) > longest:
            raise SettingError(
                setting,
                f"{getattr(settings, setting)} is more than the {longest} tokens that context and KV cache allow",
            )
    return WorkerCapacity(
        incarnation=incarnation,
        name=name,
        model=directory.name,
        model_id=settings.model_id,
        dtype=ready.dtype,
        block_size=ready.block_size,
        num_blocks=num_blocks,
        max_batch_prefill_tokens=ready.max_batch_prefill_tokens,
        context=ready.context,
        eos_ids=ready.eos_ids,
        world_size=ready.world_size,
        device=ready.device,
    )


async def seal(redis: Redis, keys: Keys, incarnation: str) -> None:
    """Our last word: whoever follows our reports learns at once that nothing more comes."""
    try:
        async with asyncio.timeout(SEAL_TIMEOUT_S):
            logs_of = [
                keys.log(incarnation),
                keys.reports(incarnation),
                keys.worker(incarnation),
                keys.workers,
            ]
            await script(redis, "seal")(keys=logs_of, args=[incarnation])
    except (*ERRORS, TimeoutError) as error:
        log.warning("not sealed: %s", describe_error(error))


def main() -> None:
    """A worker; or, where torchrun started us as a rank above 0, one more process of the engine of a worker
    elsewhere.
    """
    own = start_process("worker", "w0")
    with exit_when_unservable():
        settings, place = Settings.read([]), Place.read(os.environ)
        if place.world_size not in (1, settings.num_shard or place.world_size):
            raise SettingError(
                "num_shard",
                f"{settings.num_shard}, but torchrun started {place.world_size} ranks (WORLD_SIZE)",
            )
        if place.rank:
            os.execv(sys.executable, [sys.executable, "-P", "-m", "gpu_worker.engine"])
        configure_process(own, settings)
        sys.exit(uvloop.run(serve(settings, own.name, own.incarnation)))
