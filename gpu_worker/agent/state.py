"""The state that one incarnation's plans, steps and flushes share."""

import asyncio
from dataclasses import dataclass, field

from gpu_worker.agent.outbox import Outbox
from gpu_worker.agent.row_text import RowTable


@dataclass(slots=True)
class AgentState:
    """
    Attributes:
        table: the rows that the engine holds.
        draining: the worker takes no more rows and ends once it holds none.
        outbox: what the next flush publishes; `wake` says that there is something.
        epoch, plan, acknowledged: of the newest plan.
        until, prefill_tokens: the newest grant.
        step: the last step that the engine completed.
        report_at_step: a report is due once this step is completed, so that the next grant comes in time.
        num_tokens: tokens sampled in this incarnation's life.
        takeover_pending: a new batcher that adopts no rows waits until none is left.
        idle: whether no row is held and everything is published.
    """

    table: RowTable
    draining: asyncio.Event = field(default_factory=asyncio.Event)
    outbox: Outbox = field(default_factory=Outbox)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    epoch: int = 0
    plan: int = 0
    acknowledged: int = 0
    until: int = 0
    prefill_tokens: int = 0
    step: int = 0
    report_at_step: int = 0
    num_tokens: int = 0
    takeover_pending: bool = False

    def next_incarnation(self) -> "AgentState":
        """The state of the next incarnation over the same engine, which holds no row any more. Numbers of
        rows and steps go on, and so does the grant.
        """
        table = RowTable(self.table.tokenizer, last_row=self.table.last_row)
        return AgentState(table, self.draining, step=self.step, until=self.until)

    def finish_takeover(self) -> None:
        """Answers a new batcher with the next report."""
        self.takeover_pending = False
        self.outbox.takeover = True
        self.wake.set()
