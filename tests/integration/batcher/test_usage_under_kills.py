"""Workers, batchers and gateways are killed, clients hang up: each committed token is counted once.

Agents are the real ones over an engine without a model, in this process; batchers are processes. Clients
queue requests as gateways do.
"""

import asyncio
import contextlib
import random
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import pytest
from redis.asyncio import Redis

from api.requests.request_scripts import cancel_request
from api.requests.usage import Owner, Used, month_begin, month_name, read_hours
from common.broker.client import connect
from common.broker.keys import Keys
from common.broker.pool_client import PoolClient
from common.messages.codec import encode
from common.messages.records import pack_ids
from common.messages.request import Generate, StoppingParams, UsageAccount
from deploy.launcher.embedded_broker import Broker
from tests.support.machine.killed_pool import KEYS, KilledPool
from tests.support.scripts import admit_request
from tests.support.waiting import wait_until

POOR = "poor"
"""The API key with a budget."""
POLL_S = 0.01
KEPT_MS = 3_600_000
HUNG_S = 60.0


@dataclass(frozen=True)
class MeteringPlan:
    """What a run does; `every_s`: mean time between two kills."""

    seed: int = 1
    kills: int = 30
    num_workers: int = 3
    num_clients: int = 24
    every_s: float = 0.06
    step_s: float = 0.004
    budget: int = 2000


@dataclass
class MeteringOutcome:
    """What was counted, and what is committed, by owner.

    Attributes:
        spent: tokens of the key with a budget; `budget` is what it may spend.
        pending: what is set aside although no request is left.
        wrong: answers that ended at their length with another number of tokens.
    """

    kills: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    counted: dict[Owner, Used] = field(default_factory=dict)
    committed: dict[Owner, Used] = field(default_factory=dict)
    spent: int = 0
    budget: int = 0
    pending: dict[bytes, bytes] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    @property
    def drift(self) -> int:
        """Tokens and requests that were counted too often or not at all."""
        owners = {*self.counted, *self.committed}
        pairs = [(self.counted.get(one, Used()), self.committed.get(one, Used())) for one in owners]
        return sum(
            abs(getattr(counted, name) - getattr(committed, name))
            for counted, committed in pairs
            for name in ("requests", "prompt", "generated")
        )


class MeteredPool:
    """The processes of a run, and its requests."""

    def __init__(self, plan: MeteringPlan, url: str, redis: Redis) -> None:
        self.plan = plan
        self.redis = redis
        self.draw = random.Random(plan.seed)
        self.requests: list[Generate] = []
        self.pool = KilledPool(url, redis, plan.num_workers, plan.step_s, num_blocks=80)
        self.num_asked = 0
        self.gateway = ""
        self.stopping = asyncio.Event()
        self.outcome = MeteringOutcome(budget=plan.budget, kills=self.pool.kills)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        await self.start_gateway()
        async with self.pool.running():
            yield

    # --- kills ----------------------------------------------------------------------------------------------

    async def kill(self) -> None:
        """Kill a worker, wherever its tasks are, or now and then a batcher or the gateway."""
        drawn = self.draw.random()
        if drawn < 0.1:
            await self.pool.kill_batcher(self.draw.choice(list(self.pool.batchers)))
        elif drawn < 0.25:
            await self.kill_gateway()
        else:
            await self.pool.kill_worker(self.draw.choice(list(self.pool.workers)))

    async def kill_gateway(self) -> None:
        """A gateway of which nothing is left but its requests; the next one is there."""
        await self.redis.delete(KEYS.gateway(self.gateway))
        self.outcome.kills["gateway"] += 1
        await self.start_gateway()

    async def start_gateway(self) -> None:
        self.gateway = f"g{self.outcome.kills['gateway']}"
        await self.redis.hset(KEYS.gateway(self.gateway), "streams", "0")  # type: ignore[misc]

    # --- clients --------------------------------------------------------------------------------------------

    def new_request(self) -> Generate:
        self.num_asked += 1
        draw = self.draw
        key_id = draw.choice(["k0", "k1", "", POOR])
        prompt = [draw.randrange(300, 1000) for _ in range(draw.randrange(1, 60))]
        account = UsageAccount(
            "m",
            pays_prompt=draw.random() < 0.8,
            budget_tokens=self.plan.budget if key_id == POOR else 0,
        )
        return Generate(
            f"r{self.num_asked}",
            "d",
            pack_ids(prompt),
            StoppingParams(draw.randrange(1, 80)),
            channel=KEYS.events("g"),
            result_ttl_ms=KEPT_MS,
            gateway=draw.choice(["", self.gateway]),
            grace_ms=50,
            tenant=draw.choice(["", "acme"]),
            key_id=key_id,
            account=account,
        )

    async def run_client(self) -> None:
        while not self.stopping.is_set():
            request = self.new_request()
            self.requests.append(request)
            if await self.admit(request):
                await self.read(request)

    async def admit(self, request: Generate) -> bool:
        outcome = (await admit_request(self.redis, request, encode(request), keys=KEYS)).outcome
        if outcome != "admitted":
            self.outcome.ends[f"refused: {outcome}"] += 1
            self.requests.remove(request)
            await asyncio.sleep(POLL_S)
        return outcome == "admitted"

    async def read(self, request: Generate) -> None:
        """Wait for the end, or hang up before it."""
        hangs_up = self.draw.random() < 0.3
        wait_s = self.draw.uniform(0.0, 0.5) if hangs_up else HUNG_S
        with contextlib.suppress(TimeoutError):
            await wait_until(lambda: self.has_ended(request), wait_s)
            return
        assert hangs_up, f"{request.request_id} hangs"
        await cancel_request(PoolClient(self.redis, KEYS), request.request_id)
        await wait_until(lambda: self.has_ended(request), HUNG_S)

    async def has_ended(self, request: Generate) -> bool:
        return bool(await self.redis.hexists(KEYS.request(request.request_id), "terminal"))  # type: ignore[misc]

    # --- what came of it ------------------------------------------------------------------------------------

    async def compare(self) -> MeteringOutcome:
        outcome, now = self.outcome, datetime.now(UTC)
        committed: defaultdict[Owner, Used] = defaultdict(Used)
        for request in self.requests:
            committed[owner_of(request)] += await self.committed(request)
        outcome.committed = {owner: used for owner, used in committed.items() if used.generated}
        begin = month_begin(now.timestamp())
        rows = await read_hours(self.redis, max(begin, now.replace(minute=0)), now)
        counted: defaultdict[Owner, Used] = defaultdict(Used)
        for row in rows:
            counted[row.owner] += row.used
        outcome.counted = dict(counted)
        spent = await self.redis.hget(Keys.usage_spent(month_name(begin)), f"{POOR} tokens")  # type: ignore[misc]
        outcome.spent = int(spent or 0)
        outcome.pending = await self.redis.hgetall(Keys.usage_pending)  # type: ignore[misc]
        return outcome

    async def committed(self, request: Generate) -> Used:
        """What the terminal of a request says."""
        fields: list[Any] = await self.redis.hmget(  # type: ignore[misc]
            KEYS.request(request.request_id), ["terminal", "num_tokens", "error_type"]
        )
        reason, number = fields[0].decode(), int(fields[1])
        self.outcome.ends[f"{reason} {(fields[2] or b'').decode()}".strip()] += 1
        if reason == "length" and number != request.stopping.max_new_tokens:
            self.outcome.wrong.append(f"{request.request_id} has {number} tokens")
        assert request.account
        if number == 0 or not request.account.pays_prompt:
            return Used(generated=number)
        return Used(1, request.num_prompt, 0, number)


def owner_of(request: Generate) -> Owner:
    return Owner(request.key_id, request.tenant, request.account.model if request.account else "")


async def run(plan: MeteringPlan, url: str) -> MeteringOutcome:
    """Kill until the planned number of kills, wait for all ends, and compare."""
    async with connect(url) as redis:
        pool = MeteredPool(plan, url, redis)
        async with pool.running():
            clients = [asyncio.create_task(pool.run_client()) for _ in range(plan.num_clients)]
            while pool.outcome.kills.total() < plan.kills and not any(client.done() for client in clients):
                await asyncio.sleep(pool.draw.uniform(0.0, 2 * plan.every_s))
                await pool.kill()
            pool.stopping.set()
            await asyncio.gather(*clients)
            await wait_until(lambda: is_idle(redis), HUNG_S)
            return await pool.compare()


async def is_idle(redis: Redis) -> bool:
    return not await redis.xlen(KEYS.requests)


PLAN = MeteringPlan(seed=33, kills=25)


@pytest.mark.parametrize("kills", [25, pytest.param(1000, marks=pytest.mark.slow)])
async def test_what_is_counted_is_what_is_committed(broker: Broker, kills: int) -> None:
    plan = replace(PLAN, kills=kills)
    outcome = await run(plan, broker.url)
    assert outcome.kills.total() == kills and sum(used.generated for used in outcome.committed.values()) > 100
    assert outcome.drift == 0, (outcome.counted, outcome.committed)
    assert outcome.wrong == [] and outcome.pending == {}
    assert outcome.spent <= plan.budget + plan.num_clients, "one token of each row"
