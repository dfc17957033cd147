"""Batch: its state in Redis, as OpenAI's object, and the choice of those that are served first."""

import dataclasses
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from api.batches.store import StoredFile
from common.broker.pool_client import PoolClient

WINDOWS_S = {"1h": 3600, "24h": 86_400, "best_effort": None}
"""Completion windows → their seconds; None for no deadline."""
NO_DEADLINE_S = 10 * 365 * 86_400
"""What stands for the deadline of `best_effort`, in the order of service alone."""
ENDED = ("completed", "failed", "expired", "cancelled")
TIMES = (
    "in_progress_at",
    "finalizing_at",
    "completed_at",
    "failed_at",
    "expired_at",
    "cancelling_at",
    "cancelled_at",
)
FILES = ("output", "error")
WEBHOOK = b"webhook"
"""The field that says where the event of its end goes: for the script that writes the end."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What Redis has of a batch. `fields`: those that change.

    Attributes:
        tenant, key_id: who made it; requests are of that tenant, and count for that key.
        owner: whose it is.
        made_ms: Unix time; the lines' answers have it as `created`.
        digest: of the request that made it, if that had an `Idempotency-Key`.
    """

    id: str
    owner: str
    key_id: str
    endpoint: str
    input_file_id: str
    window: str
    made_ms: int
    metadata: dict[str, str]
    output_ttl_s: int | None
    fields: Mapping[str, str]
    digest: str = ""

    @property
    def member(self) -> str:
        return f"{self.owner} {self.id}"

    @property
    def deadline_s(self) -> float | None:
        """Unix time at which the batch expires."""
        seconds = WINDOWS_S[self.window]
        return None if seconds is None else self.made_ms / 1000 + seconds

    @property
    def order_ms(self) -> int:
        return self.made_ms + 1000 * (WINDOWS_S[self.window] or NO_DEADLINE_S)

    @property
    def status(self) -> str:
        status = self.fields["status"]
        return "cancelling" if status not in ENDED and "cancelling_at" in self.fields else status

    def number(self, name: str) -> int:
        return int(self.fields.get(name, "0"))

    def made(self) -> dict[str, str]:
        """The fields that never change, and the first status."""
        record = {
            "owner": self.owner,
            "key_id": self.key_id,
            "endpoint": self.endpoint,
            "input_file_id": self.input_file_id,
            "window": self.window,
            "made_ms": self.made_ms,
            "metadata": self.metadata,
            "output_ttl_s": self.output_ttl_s,
            "digest": self.digest,
        }
        return {"record": orjson.dumps(record).decode(), "status": "validating"}

    def file_id(self, kind: str) -> str:
        """The id of the output or the error file: the same whoever writes it."""
        return f"file-{self.id.removeprefix('batch_')}{kind}"

    def parts(self, kind: str) -> list[tuple[str, int]]:
        """Committed parts of a file, in order."""
        found = sorted((name, value) for name, value in self.fields.items() if name.startswith(f"{kind}:"))
        return [(value.split()[0], int(value.split()[1])) for _, value in found]

    def file(self, kind: str, now_s: int) -> StoredFile | None:
        """The record of a file that is made now; None if it has no lines."""
        parts = self.parts(kind)
        if not parts:
            return None
        return StoredFile(
            id=self.file_id(kind),
            owner=self.owner,
            filename=f"{self.id}_{kind}.jsonl",
            purpose="batch_output",
            num_bytes=sum(size for _, size in parts),
            created_at=now_s,
            expires_at=now_s + self.output_ttl_s if self.output_ttl_s else None,
            parts=parts,
        )

    def render(self) -> dict[str, Any]:
        """OpenAI's object."""
        fields = self.fields
        deadline_s = self.deadline_s
        counts = {name: self.number(name) for name in ("total", "completed", "failed")}
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": orjson.loads(fields["errors"]) if "errors" in fields else None,
            "input_file_id": self.input_file_id,
            "completion_window": self.window,
            "status": self.status,
            **{f"{kind}_file_id": fields.get(f"{kind}_file_id") for kind in FILES},
            "created_at": self.made_ms // 1000,
            "expires_at": None if deadline_s is None else int(deadline_s),
            **{name: int(fields[name]) if name in fields else None for name in TIMES},
            "request_counts": counts,
            "metadata": self.metadata or None,
        }


async def read_batch(client: PoolClient, batch_id: str) -> Batch | None:
    """None for a batch that is not there or cannot be read. Raises one of ERRORS."""
    return parse_batch(batch_id, await client.redis.hgetall(client.keys.batch(batch_id)))  # type: ignore[misc]


def parse_batch(batch_id: str, found: Mapping[bytes, bytes]) -> Batch | None:
    """A batch from its hash; None if it cannot be read. Fields of a later version are ignored."""
    try:
        record = orjson.loads(found[b"record"])
        given = {one.name: record[one.name] for one in dataclasses.fields(Batch) if one.name in record}
        rest = {name: value for name, value in found.items() if name not in (b"record", WEBHOOK)}
        fields = {name.decode(): value.decode() for name, value in rest.items()}
        return Batch(**given | {"id": batch_id, "fields": fields})
    except (KeyError, TypeError, ValueError):
        return None


async def needed_files(client: PoolClient) -> dict[str, str]:
    """Files that a batch which has not ended reads or writes → the id of that batch. Raises one of
    ERRORS.
    """
    members = await client.redis.zrange(client.keys.live_batches, 0, -1)
    ids = [member.decode().rpartition(" ")[2] for member in members]
    async with client.redis.pipeline(transaction=False) as pipe:
        for batch_id in ids:
            pipe.hget(client.keys.batch(batch_id), "record")
        records = await pipe.execute()
    read = [parse_batch(one, {b"record": record}) for one, record in zip(ids, records, strict=True)]
    batches = [batch for batch in read if batch is not None]
    return {name: one.id for one in batches for name in (one.input_file_id, *map(one.file_id, FILES))}


def choose_batches(live: Sequence[tuple[str, str]], max_batches: int) -> list[str]:
    """Which batches are served: tenants take turns, and each tenant's come by their deadlines.

    Args:
        live: owner and id, by deadline.
    """
    by_owner: defaultdict[str, deque[str]] = defaultdict(deque)
    for owner, batch_id in live:
        by_owner[owner].append(batch_id)
    turns, chosen = deque(by_owner.values()), list[str]()
    while turns and len(chosen) < max_batches:
        waiting = turns.popleft()
        chosen.append(waiting.popleft())
        if waiting:
            turns.append(waiting)
    return chosen
