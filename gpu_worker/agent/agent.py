"""The agent: plans in, tokens out. It knows Redis and text; the engine, in its own processes, knows
neither.
"""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

from common.broker import heartbeat
from common.broker.client import ERRORS, FailureLog, describe_error
from common.broker.heartbeat import process_fields
from common.broker.pool_client import PoolClient
from common.messages.codec import encode
from common.messages.events import REPEAT_S, SILENT_S
from common.messages.plan import WorkerCapacity
from common.metrics.exposition import publishing_metrics
from common.process.event_loop import run_until_one_ends, until_beat
from common.process.logs import next_incarnation, plural
from common.settings.settings import Settings
from gpu_worker import worker_scripts
from gpu_worker.agent.engine_adapters import AdapterFollower
from gpu_worker.agent.engine_client import EngineClient, EngineDied
from gpu_worker.agent.grants import PlanHandler, PlanStream
from gpu_worker.agent.publish import Flusher, Sealed, StreamsGone, raise_refusal
from gpu_worker.agent.state import AgentState
from gpu_worker.agent.steps import EngineStuck, StepHandler, Watchdog

log = logging.getLogger(__name__)

RETRY_S = 0.05
SLOW_STEPS = 20
"""A step may take this many times as long as the warm-up predicts."""
SEAL_TIMEOUT_S = 2.0
LINGER_HEARTBEATS = 2
"""A drained worker waits this many heartbeats before it exits: it may be the last one."""


class Agent:
    """A worker's stay in one pool, over one engine, in one incarnation or several.

    Attributes:
        owner: tells apart two processes that take the same incarnation.
        heartbeat_now: the next heartbeat must not wait.
    """

    def __init__(
        self,
        settings: Settings,
        pool: PoolClient,
        engine: EngineClient,
        state: AgentState,
        worker: WorkerCapacity,
    ) -> None:
        self.settings = settings
        self.pool = pool
        self.engine = engine
        self.owner = secrets.token_hex(8)
        self.heartbeat_now = asyncio.Event()
        self.begin(state, worker)

    def begin(self, state: AgentState, worker: WorkerCapacity) -> None:
        """Begin an incarnation."""
        pool, engine = self.pool, self.engine
        self.worker = worker
        self.state = state
        self.state.idle.set()
        self.steps = StepHandler(engine, self.state, worker.prefix_caching)
        plans = PlanStream(pool.redis, pool.keys.plans(worker.incarnation))
        self.plans = PlanHandler(plans, pool, worker.all_pictures, engine, self.state, self.steps)
        self.flusher = Flusher(pool, worker.incarnation, self.state, self.steps, worker.block_size)
        self.watchdog = Watchdog(self.step_timeout_s, self.is_busy, engine.run_delay_s)
        self.adapters = AdapterFollower(
            pool,
            engine,
            self.state.adapters,
            interval_s=min(REPEAT_S, self.settings.heartbeat_s),
            used=lambda: {row.request.adapter for row in self.state.rows.values()},
            note_change=self.note_answer,
        )

    async def serve(self, *others: Coroutine[Any, Any, object]) -> None:
        """Run until the first of this and `others` ends, with metrics, and seal the logs. Raises Sealed,
        EngineDied, EngineStuck.
        """
        why = "died"
        try:
            async with publishing_metrics(self.pool):
                await run_until_one_ends(self.run(), *others)
            why = "drained"
        except (Sealed, EngineDied, EngineStuck):
            log.error("incarnation %s is over", self.worker.incarnation)
            raise
        finally:
            await self.seal(why)

    async def seal(self, why: str) -> None:
        """Seal the logs, so that batcher and gateways learn at once that the stay has ended."""
        pool = self.pool
        try:
            async with asyncio.timeout(SEAL_TIMEOUT_S):
                await pool.run(heartbeat.seal(pool.keys, self.worker.incarnation, why=why))
        except (*ERRORS, TimeoutError) as error:
            log.warning("not sealed: %s", describe_error(error))

    async def run(self) -> None:
        """Serve until the worker is drained. If the streams are gone, it goes on as the next incarnation.
        Raises Sealed, EngineDied, EngineStuck.
        """
        while not await self.run_incarnation():
            await self.stop_rows()
            incarnation = next_incarnation(self.worker.incarnation)
            self.begin(self.state.next_incarnation(), replace(self.worker, incarnation=incarnation))
            log.warning("the same engine goes on as incarnation %s", incarnation)

    async def run_incarnation(self) -> bool:
        """Serve until the worker is drained, or the streams are gone → whether it is drained. Raises Sealed,
        EngineDied or EngineStuck when this incarnation is over before that.
        """
        await self.create_streams()
        try:
            await run_until_one_ends(
                self.plans.run(),
                self.steps.run(self.watchdog, self.flusher.flush_step),
                self.flusher.run(),
                self.send_heartbeats(),
                self.watchdog.run(),
                self.drain(),
                *([self.adapters.run()] if self.worker.max_loras else []),
            )
        except (EngineDied, EngineStuck) as error:
            await self.adapters.note_end(error)
            raise
        except StreamsGone:
            log.warning("the streams of incarnation %s are gone", self.worker.incarnation)
            return self.state.draining.is_set()
        else:
            return True
        finally:
            self.engine.metrics.count_steps()
            self.flusher.client.close()

    def leave(self) -> None:
        """Take no more rows: the worker is to serve another model."""
        self.state.leaving.set()
        self.heartbeat_now.set()

    async def stop_rows(self) -> None:
        """Return once the engine holds no row of this incarnation, which is over. Raises EngineDied,
        EngineStuck.
        """
        rows = self.state.rows
        watchdog = Watchdog(self.step_timeout_s, lambda: bool(rows), self.engine.run_delay_s)
        await run_until_one_ends(self.steps.stop_all(watchdog), watchdog.run())

    async def create_streams(self) -> None:
        """Create this incarnation's log and report streams; nothing is read or published before that. Raises
        Sealed where another process has this incarnation.
        """
        call = worker_scripts.create_logs(self.pool.keys, self.worker.incarnation, owner=self.owner)
        failures = FailureLog(log, "creating streams")
        while True:
            with failures.caught():
                if not await self.pool.run(call):
                    raise Sealed(f"another process has the incarnation {self.worker.incarnation}")
                return
            await asyncio.sleep(RETRY_S)

    def is_busy(self) -> bool:
        """Whether the engine has rows and may run a step, or has a command to answer."""
        return bool(self.engine.asked) or (
            bool(self.state.rows) and self.state.step < self.state.granted.until
        )

    def note_answer(self) -> None:
        """Note that the engine has answered a command about an adapter."""
        self.watchdog.reset()
        self.heartbeat_now.set()

    def step_timeout_s(self) -> float:
        """How long a step may take: STEP_TIMEOUT_S, or SLOW_STEPS times as long as the warm-up predicts for a
        step of all tokens granted, if that is longer.
        """
        tokens = self.state.granted.prefill_tokens + len(self.state.rows)
        return max(self.settings.step_timeout_s, SLOW_STEPS * tokens * self.worker.token_ms / 1e3)

    async def send_heartbeats(self) -> None:
        """Send a heartbeat every few seconds, and repeat the last event of each silent channel. Raises
        Sealed, StreamsGone.
        """
        failures = FailureLog(log, "a heartbeat")
        while True:
            self.flusher.poll()  # no step may come to do so
            if self.flusher.report_due():
                self.state.wake.set()
            self.engine.metrics.count_steps()
            with failures.caught():
                await self.send_heartbeat()
                await self.pool.publish(self.flusher.channels.repeated_messages(SILENT_S))
            pause_s = until_beat(min(REPEAT_S, self.settings.heartbeat_s))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self.heartbeat_now.wait()
            self.heartbeat_now.clear()

    async def send_heartbeat(self) -> None:
        """Write to Redis that the worker is alive, what it can hold and what it holds; the answer may ask it
        to drain. Raises Sealed or StreamsGone when the incarnation is over.
        """
        state = self.state
        call = worker_scripts.worker_heartbeat(
            self.pool.keys,
            self.worker.incarnation,
            capacity=encode(self.worker),
            ttl_ms=int(self.settings.worker_ttl_s * 1000),
            state="draining" if state.draining.is_set() or state.leaving.is_set() else "ready",
            step=state.step,
            fields=process_fields()
            | {
                "rows": len(state.live),
                "max_rows": self.worker.places(self.settings.max_batch_size),
                "blocks": state.num_blocks(self.worker.block_size),
                "tokens": state.num_tokens,
                "known": state.num_known,
                "cached": state.num_cached,
                **({"adapters": encode(state.adapters.message)} if self.worker.max_loras else {}),
            },
        )
        reply = await self.pool.run(call)
        if reply == "DRAIN":
            state.draining.set()
        else:
            raise_refusal(reply)

    async def drain(self) -> None:
        """Wait until the worker is asked to drain, then until it holds no row; after a signal for at most
        GRACEFUL_TERMINATION_TIMEOUT.
        """
        await self.state.draining.wait()
        log.info("draining, with %s", plural(len(self.state.rows), "row"))
        self.heartbeat_now.set()
        await run_until_one_ends(self.become_idle(), self.run_out_of_time())

    async def become_idle(self) -> None:
        while not self.state.idle.is_set():
            await self.state.idle.wait()
            await asyncio.sleep(LINGER_HEARTBEATS * self.settings.heartbeat_s)

    async def run_out_of_time(self) -> None:
        await self.state.signalled.wait()
        await asyncio.sleep(self.settings.graceful_termination_timeout)
