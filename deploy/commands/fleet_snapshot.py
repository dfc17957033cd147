"""Snapshot: the answer of GET /fleet at one moment; rates are differences between snapshots."""

from collections.abc import Sequence
from typing import Any

import httpx

from deploy.commands.client import ServerError, fetch_json

Snapshot = dict[str, Any]
"""The answer of GET /fleet. Any key may be absent."""


def fetch_snapshot(client: httpx.Client) -> Snapshot:
    """Fetch the state of the fleet. Raises ServerError."""
    fleet = fetch_json(client, "/fleet")
    if (
        not isinstance(fleet, dict)
        or not isinstance(fleet.get("processes"), list)
        or not all(isinstance(one, dict) for one in fleet["processes"])
    ):
        raise ServerError(f"{client.base_url} answers /fleet, but not as a Tokenfleet does")
    return fleet


def health(fleet: Snapshot) -> tuple[str, str]:
    """Return `good`, `warn` or `bad`, and why, as the gateway judges it."""
    found = fleet.get("health")
    found = found if isinstance(found, dict) else {}
    return str(found.get("state") or "bad"), str(found.get("text") or "")


def with_rates(snapshots: Sequence[Snapshot]) -> Snapshot:
    """Return the last snapshot, with "tokens_per_s" (null: not known yet) for every process that counts
    tokens, and for the fleet.
    """
    known = rates(snapshots)
    processes = [
        one | {"tokens_per_s": known.get(one.get("id"))} if "tokens" in one else one
        for one in snapshots[-1]["processes"]
    ]
    return snapshots[-1] | {"processes": processes, "tokens_per_s": total(known)}


def rates(snapshots: Sequence[Snapshot]) -> dict[Any, float]:
    """Tokens per second by process id, since the earliest snapshot that shows the process."""
    found: dict[Any, float] = {}
    last = snapshots[-1]
    for fleet in reversed(snapshots):
        seconds = last.get("time_s", 0) - fleet.get("time_s", 0)
        then = {one.get("id"): one.get("tokens") for one in fleet["processes"]}
        for one in last["processes"]:
            before, after = then.get(one.get("id")), one.get("tokens")
            if seconds > 0 and before is not None and after is not None:
                found[one.get("id")] = max(0.0, (after - before) / seconds)
    return found


def total(known: dict[Any, float]) -> float | None:
    return sum(known.values()) if known else None
