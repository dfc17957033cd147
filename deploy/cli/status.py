"""`tokenfleet status`: a table of the fleet's processes, live in a terminal, printed once elsewhere."""

import argparse
import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
import orjson
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from deploy.cli.client import ServerError, fetch_json, new_table, printable

Snapshot = dict[str, Any]
"""The answer of GET /fleet at one moment. Any key may be absent."""

REFRESH_S = 2.0
LATE_S = 2.0
WIDE = 118
"""Columns of a terminal that shows whole ids, hosts and process ids."""
STYLES = {
    **dict.fromkeys(("ready", "active", "awake", "good"), "green"),
    **dict.fromkeys(("starting", "draining", "waking", "warn"), "yellow"),
    **dict.fromkeys(("standby", "asleep"), "cyan"),
    **dict.fromkeys(("silent", "bad"), "bold red"),
}
STATES = ("awake", "waking", "asleep", "")
"""States of a model at a worker, the best first."""
KINDS = ("broker", "gateway", "batcher", "worker", "jobworker")


def show(client: httpx.Client, flags: argparse.Namespace) -> int:
    """Show the table, or print it once. Returns 0 when the fleet serves requests."""
    console = Console()
    before = last = fetch_snapshot(client)
    if flags.json or flags.once or not console.is_terminal:
        time.sleep(REFRESH_S)  # a rate needs two snapshots
        last = fetch_snapshot(client)
        if flags.json:
            text = orjson.dumps(with_rates(before, last), option=orjson.OPT_INDENT_2).decode()
            console.out(text, highlight=False)
        else:
            console.print(view(before, last, console.width))
    else:
        with contextlib.suppress(KeyboardInterrupt), Live(console=console, auto_refresh=False) as live:
            failure = ""
            while True:  # a fleet that does not answer is asked again
                live.update(view(before, last, console.width, failure), refresh=True)
                time.sleep(REFRESH_S)
                try:
                    before, last = last, fetch_snapshot(client)
                    failure = ""
                except ServerError as error:
                    failure = f"{error}; asking again"
    return 1 if health(last)[0] == "bad" else 0


def fetch_snapshot(client: httpx.Client) -> Snapshot:
    """Fetch the state of the fleet. Raises ServerError."""
    fleet = fetch_json(client, "/fleet")
    processes = fleet.get("processes") if isinstance(fleet, dict) else None
    if not isinstance(processes, list) or not all(isinstance(one, dict) for one in processes):
        raise ServerError(f"{client.base_url} answers /fleet, but not as a Tokenfleet does")
    return fleet  # type: ignore[no-any-return]


def health(fleet: Snapshot) -> tuple[str, str]:
    """Return `good`, `warn` or `bad`, and the reason, as the gateway reports them."""
    found = fleet.get("health") or {}
    return str(found.get("state") or "bad"), str(found.get("text") or "")


def with_rates(before: Snapshot, last: Snapshot) -> Snapshot:
    """Return the last snapshot with "tokens_per_s" (null: not known yet) for the fleet, and for every process
    that counts tokens.
    """
    known = rates(before, last)
    processes = [
        one | {"tokens_per_s": known.get(one.get("id"))} if "tokens" in one else one
        for one in last["processes"]
    ]
    return last | {"processes": processes, "tokens_per_s": sum(known.values()) if known else None}


def rates(before: Snapshot, last: Snapshot) -> dict[Any, float]:
    """Tokens per second by process id, by the fleet's own clock."""
    seconds = last.get("time_s", 0) - before.get("time_s", 0)
    counted = {one.get("id"): one["tokens"] for one in before["processes"] if "tokens" in one}
    return {
        one["id"]: max(0.0, (one["tokens"] - counted[one["id"]]) / seconds)
        for one in last["processes"]
        if seconds > 0 and "tokens" in one and one.get("id") in counted
    }


def view(before: Snapshot, last: Snapshot, width: int, failure: str = "") -> RenderableType:
    known = rates(before, last)
    parts = [head(last, sum(known.values()) if known else None), Text(), processes_table(last, known, width)]
    if models := last.get("models"):
        parts += [Text(), models_table(models)]
    return Group(*parts, *([Text(f"\n{failure}", style="red")] if failure else []))


def head(fleet: Snapshot, rate: float | None) -> RenderableType:
    """Return the lines above the table: the model, requests and speed, then the fleet's health."""
    requests = fleet.get("requests") or {}
    limit = f" of {number(requests['limit'])}" if requests.get("limit") else ""
    state, why = health(fleet)
    return Text.assemble(
        (printable(str(fleet.get("model", "?"))), "bold"),
        (f"  pool {printable(str(fleet.get('pool', '?')))}\n", "dim"),
        f"{number(requests.get('live'))} live, {number(requests.get('waiting'))} waiting{limit}",
        f"   {number(rate, 1)} tokens/s\n",
        (printable(why), STYLES.get(state, "")),
    )


def processes_table(fleet: Snapshot, known: Mapping[Any, float], width: int) -> RenderableType:
    """Return the table, one line for each process."""

    def order(one: Snapshot) -> tuple[int, str]:
        kind = one.get("kind")
        return KINDS.index(kind) if kind in KINDS else len(KINDS), str(one.get("id", ""))

    rows = [
        cells_of(one, known.get(one.get("id")), width >= WIDE)
        for one in sorted(fleet["processes"], key=order)
    ]
    shown = new_table()
    for title in rows[0] if rows else ():
        shown.add_column(title, no_wrap=True, overflow="ellipsis")
    for row in rows:
        shown.add_row(*row.values())
    return shown


def cells_of(one: Snapshot, rate: float | None, wide: bool) -> dict[str, Text]:
    """The cells of one process, by column."""
    name, state, age_s = str(one.get("id") or ""), str(one.get("state") or ""), one.get("age_s")
    return {
        "kind": text(one.get("kind"), "dim"),
        "name": text(name if wide else name.split("-")[0], "bold"),
        **({title: text(one.get(title), "dim") for title in ("host", "pid")} if wide else {}),
        "state": text(state, STYLES.get(state, "")),
        "rows": text(share(one, "rows", "max_rows")),
        "KV blocks": text(share(one, "blocks", "num_blocks")),
        "tokens/s": text(number(rate, 1) if "tokens" in one else ""),
        "load": text(load(one)),
        "seen": text(
            f"{age_s:.1f} s" if age_s is not None else "", "yellow" if (age_s or 0) > LATE_S else "dim"
        ),
    }


def models_table(models: Sequence[Snapshot]) -> RenderableType:
    """Return a line for each model that the workers serve in turns (MODELS)."""
    shown = new_table()
    for name in ("model", "waiting", "workers", "wakes from", "in"):
        shown.add_column(name, no_wrap=True, overflow="ellipsis")
    for one in models:
        workers = one.get("workers") or [{}]
        states = [str(worker.get("state") or "") for worker in workers]
        best = min(workers, key=lambda worker: (worker.get("kept_in") != "memory", worker.get("swap_s", 0)))
        shown.add_row(
            text(one.get("pool"), "bold"),
            text(number(one.get("waiting"))),
            text(", ".join(states), STYLES.get(min(states, key=STATES.index), "")),
            text(best.get("kept_in")),
            text(f"{number(best['swap_s'], 2)} s" if best.get("swap_s") else ""),
        )
    return shown


def text(value: Any, style: str = "") -> Text:
    return Text("" if value is None else printable(str(value)), style=style)


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
