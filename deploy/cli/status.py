"""`tokenfleet status`: a table of the fleet's processes, live in a terminal, printed once elsewhere."""

import argparse
import contextlib
import time
from collections.abc import Mapping
from typing import Any

import httpx
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from deploy.cli.client import Columns, ServerError, answer_errors, fetch_json, print_json, printable, table_of

Snapshot = dict[str, Any]
"""The answer of GET /fleet at one moment. Any key may be absent."""

REFRESH_S = 2.0
WIDE = 118
"""Columns of a terminal that shows whole ids, hosts and process ids."""
STATES = ("awake", "waking", "asleep", "")
"""States of a model at a worker, the best first."""
KINDS = ("broker", "gateway", "batcher", "worker")


def show(client: httpx.Client, flags: argparse.Namespace) -> int:
    """Show the table, or print it once. Returns 0 when the fleet serves requests."""
    console = Console(highlight=False)
    before = last = fetch_snapshot(client)
    if flags.json or flags.once or not console.is_terminal:
        time.sleep(REFRESH_S)  # a rate needs two snapshots
        last = fetch_snapshot(client)
        if flags.json:
            print_json(with_rates(before, last))
        else:
            console.print(view(before, last, console.width))
    else:
        with contextlib.suppress(KeyboardInterrupt), Live(console=console, auto_refresh=False) as live:
            failure = ""
            while True:  # a fleet that does not answer is asked again
                live.update(Group(view(before, last, console.width), failure), refresh=True)
                time.sleep(REFRESH_S)
                try:
                    before, last = last, fetch_snapshot(client)
                    failure = ""
                except ServerError as error:
                    failure = f"\n{error}; asking again"
    return 1 if health(last)[0] == "bad" else 0


def fetch_snapshot(client: httpx.Client) -> Snapshot:
    """Fetch the state of the fleet. Raises ServerError."""
    with answer_errors(str(client.base_url)):
        fleet: Snapshot = fetch_json(client, "/fleet")
        sorted(fleet["processes"], key=order)
    return fleet


def health(fleet: Snapshot) -> tuple[str, str]:
    """Return `good`, `warn` or `bad`, and the reason, as the gateway reports them."""
    found = fleet.get("health") or {}
    return str(found.get("state") or "bad"), str(found.get("text") or "")


def with_rates(before: Snapshot, last: Snapshot) -> Snapshot:
    """Return the last snapshot with "tokens_per_s" (null: not known yet) for the fleet, and for every process
    that counts tokens, by the fleet's own clock.
    """
    seconds = last.get("time_s", 0) - before.get("time_s", 0)
    counted = {one.get("id"): one["tokens"] for one in before["processes"] if "tokens" in one}
    known = {
        one["id"]: max(0.0, (one["tokens"] - counted[one["id"]]) / seconds)
        for one in last["processes"]
        if seconds > 0 and "tokens" in one and one.get("id") in counted
    }
    processes = [
        one | {"tokens_per_s": known.get(one.get("id"))} if "tokens" in one else one
        for one in last["processes"]
    ]
    return last | {"processes": processes, "tokens_per_s": sum(known.values()) if known else None}


def view(before: Snapshot, last: Snapshot, width: int) -> RenderableType:
    """The model, requests and speed, the fleet's health, and a line for each process and model."""
    fleet = with_rates(before, last)
    requests = fleet.get("requests") or {}
    limit = f" of {number(requests['limit'])}" if requests.get("limit") else ""
    head = (
        f"{fleet.get('model', '?')}  pool {fleet.get('pool', '?')}\n"
        f"{number(requests.get('live'))} live, {number(requests.get('waiting'))} waiting{limit}"
        f"   {number(fleet['tokens_per_s'], 1)} tokens/s\n{health(fleet)[1]}\n"
    )
    names = [name(one) for one in fleet["processes"]]
    hidden = ("pid",) if len({*names}) < len(names) else ("host", "pid")
    every: Columns = {**PROCESSES, "name": name}
    narrow = {title: of for title, of in every.items() if title not in hidden}
    columns = PROCESSES if width >= WIDE else narrow
    parts: list[RenderableType] = [
        Text(printable(head)),
        table_of(sorted(fleet["processes"], key=order), columns),
    ]
    if models := fleet.get("models"):
        parts += ["", table_of(models, MODELS)]
    return Group(*parts)


def name(one: Snapshot) -> str:
    """Return a process's id without its incarnation; replicas on several hosts may share it."""
    return str(one.get("id", "")).rsplit("-", 1)[0]


def order(one: Snapshot) -> tuple[int, str]:
    kind = one.get("kind")
    return KINDS.index(kind) if kind in KINDS else len(KINDS), str(one.get("id", ""))


def load(one: Snapshot) -> str:
    """Return a batcher's waiting requests, a gateway's open streams or a broker's commands per second."""
    units = {"waiting": "waiting", "streams": "streams", "commands_per_s": "ops/s"}
    return ", ".join(
        f"{number(one[name])} {unit}" for name, unit in units.items() if one.get(name) is not None
    )


def share(one: Snapshot, used: str, limit: str) -> str:
    if one.get(used) is None:
        return ""
    return f"{number(one[used])}/{number(one[limit])}" if one.get(limit) else number(one[used])


def number(value: float | None, digits: int = 0) -> str:
    return "–" if value is None else f"{value:,.{digits}f}".replace(",", " ")


def workers_of(one: Snapshot) -> list[str]:
    return sorted((str(worker.get("state") or "") for worker in one.get("workers") or ()), key=STATES.index)


def fastest(one: Snapshot) -> Mapping[str, Any]:
    """The worker at which a model wakes first."""
    workers = one.get("workers") or [{}]
    return min(workers, key=lambda worker: (worker.get("kept_in") != "memory", worker.get("swap_s", 0)))


PROCESSES: Columns = {
    "kind": lambda one: str(one.get("kind", "")),
    "name": lambda one: str(one.get("id", "")),
    "host": lambda one: str(one.get("host", "")),
    "pid": lambda one: str(one.get("pid") or ""),
    "state": lambda one: str(one.get("state", "")),
    "rows": lambda one: share(one, "rows", "max_rows"),
    "KV blocks": lambda one: share(one, "blocks", "num_blocks"),
    "tokens/s": lambda one: number(one["tokens_per_s"], 1) if "tokens" in one else "",
    "load": load,
    "seen": lambda one: f"{one['age_s']:.1f} s" if one.get("age_s") is not None else "",
}
MODELS: Columns = {
    "model": lambda one: str(one.get("pool", "")),
    "waiting": lambda one: number(one.get("waiting")),
    "workers": lambda one: ", ".join(workers_of(one)),
    "wakes from": lambda one: str(fastest(one).get("kept_in", "")),
    "in": lambda one: f"{number(fastest(one).get('swap_s'), 2)} s" if fastest(one).get("swap_s") else "",
}
"""The models that workers serve in turns (MODELS)."""
