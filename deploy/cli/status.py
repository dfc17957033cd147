"""`tokenfleet status`: a table of the fleet's processes, live in a terminal, printed once elsewhere."""

import argparse
import contextlib
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import httpx
import orjson
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from deploy.cli.client import ServerError, fetch_json, new_table, printable

Snapshot = dict[str, Any]
"""The answer of GET /fleet at one moment. Any key may be absent."""

REFRESH_S = 1.0
NUM_SNAPSHOTS = 4
"""A rate is the difference over this many snapshots, which evens out the times of the heartbeats."""
LATE_S = 2.0
NEARLY_FULL = 0.9
WIDE, MEDIUM, SMALL = 118, 72, 56
"""Least widths of a terminal, in columns."""
COLUMNS: Sequence[tuple[str, int, Any]] = (
    ("kind", MEDIUM, "left"),
    ("name", 0, "left"),
    ("host", WIDE, "left"),
    ("pid", WIDE, "right"),
    ("state", 0, "left"),
    ("rows", 0, "left"),
    ("KV blocks", 0, "left"),
    ("tokens/s", 0, "right"),
    ("load", MEDIUM, "right"),
    ("seen", SMALL, "right"),
)
"""(title, least width of a terminal that shows it, side that it is aligned to)"""
STYLES = {
    "ready": "green",
    "active": "green",
    "standby": "cyan",
    "starting": "yellow",
    "draining": "yellow",
    "awake": "green",
    "waking": "yellow",
    "asleep": "cyan",
    "silent": "red",
}
STATES = ("awake", "waking", "asleep", "")
"""States of a model at a worker, the best first."""
HEALTH_STYLES = {"good": "green", "warn": "yellow", "bad": "bold red"}
KINDS = ("broker", "gateway", "batcher", "worker", "jobworker")


def show(client: httpx.Client, flags: argparse.Namespace) -> int:
    """Show the table, or print it once. Returns 0 when the fleet serves requests."""
    console = Console()
    snapshots = deque([fetch_snapshot(client)], maxlen=NUM_SNAPSHOTS)
    if flags.json or flags.once or not console.is_terminal:
        print_once(client, snapshots, console, flags.json)
    else:
        watch(client, snapshots, console)
    return 1 if health(snapshots[-1])[0] == "bad" else 0


def print_once(client: httpx.Client, snapshots: deque[Snapshot], console: Console, as_json: bool) -> None:
    time.sleep(REFRESH_S)  # a rate needs two snapshots
    snapshots.append(fetch_snapshot(client))
    if as_json:
        console.out(orjson.dumps(with_rates(snapshots), option=orjson.OPT_INDENT_2).decode(), highlight=False)
    else:
        console.print(view(snapshots, console.width))


def watch(client: httpx.Client, snapshots: deque[Snapshot], console: Console) -> None:
    """Show the table until Ctrl-C. A fleet that does not answer is asked again every second."""
    with (
        contextlib.suppress(KeyboardInterrupt),
        Live(console=console, auto_refresh=False, transient=False) as live,
    ):
        failure = ""
        while True:
            live.update(view(snapshots, console.width, failure), refresh=True)
            time.sleep(REFRESH_S)
            try:
                snapshots.append(fetch_snapshot(client))
                failure = ""
            except ServerError as error:
                failure = str(error)


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
    """Return `good`, `warn` or `bad`, and the reason, as the gateway reports them."""
    found = fleet.get("health")
    found = found if isinstance(found, dict) else {}
    return str(found.get("state") or "bad"), str(found.get("text") or "")


def with_rates(snapshots: Sequence[Snapshot]) -> Snapshot:
    """Return the last snapshot with "tokens_per_s" (null: not known yet) for the fleet, and for every process
    that counts tokens.
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


def view(snapshots: Sequence[Snapshot], width: int, failure: str = "") -> RenderableType:
    known = rates(snapshots)
    parts: list[RenderableType] = [
        head(snapshots[-1], total(known), width),
        Text(),
        table(snapshots[-1], known, width),
    ]
    if models := snapshots[-1].get("models"):
        parts += [Text(), models_table(models)]
    if failure:
        parts += [Text(), Text(f"{failure}; asking again", style="red")]
    return Group(*parts)


def head(fleet: Snapshot, rate: float | None, width: int) -> Text:
    """Return the lines above the table: model, requests and speed, then the fleet's health."""
    requests = fleet.get("requests") or {}
    limit = f" of {number(requests['limit'])}" if requests.get("limit") else ""
    state, why = health(fleet)
    return Text.assemble(
        (printable(str(fleet.get("model", "?"))), "bold"),
        (f"  pool {printable(str(fleet.get('pool', '?')))}", "dim"),
        "   " if width >= WIDE else "\n",
        f"{number(requests.get('live'))} live, {number(requests.get('waiting'))} waiting",
        (limit, "dim"),
        ("   ", ""),
        (f"{number(rate, 1)} tokens/s", "bold green" if rate else ""),
        (f"\n{printable(why)}" if why else "", HEALTH_STYLES.get(state, "")),
    )


def table(fleet: Snapshot, known: dict[Any, float], width: int) -> Table:
    """Return the table, one line for each process. A narrow terminal gets fewer columns and no bars."""
    shown = new_table()
    for name, least_width, justify in COLUMNS:
        if width >= least_width:
            shown.add_column(name, justify=justify, no_wrap=True, overflow="ellipsis")
    for one in sorted(fleet["processes"], key=sort_key):
        cells = cells_of(one, known.get(one.get("id")), width >= WIDE)
        shown.add_row(*(cells[name] for name, least_width, _ in COLUMNS if width >= least_width))
    return shown


def models_table(models: Sequence[Snapshot]) -> Table:
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
            text(number(one.get("waiting")), ""),
            text(", ".join(states), STYLES.get(min(states, key=STATES.index), "")),
            text(best.get("kept_in"), ""),
            text(f"{number(best['swap_s'], 2)} s" if best.get("swap_s") else "", ""),
        )
    return shown


def sort_key(one: Snapshot) -> tuple[int, str]:
    kind = one.get("kind")
    return KINDS.index(kind) if kind in KINDS else len(KINDS), str(one.get("id", ""))


def cells_of(one: Snapshot, rate: float | None, wide: bool) -> dict[str, Text]:
    """The cells of one process, by column."""
    state = str(one.get("state") or "")
    name = str(one.get("id") or "")
    age_s = one.get("age_s")
    return {
        "kind": text(one.get("kind"), "dim"),
        "name": text(name if wide else name.split("-")[0], "bold"),
        "host": text(one.get("host"), "dim"),
        "pid": text(one.get("pid") or None, "dim"),
        "state": text(state, STYLES.get(state, "")),
        "rows": share(one.get("rows"), one.get("max_rows"), wide),
        "KV blocks": share(one.get("blocks"), one.get("num_blocks"), wide),
        "tokens/s": Text(number(rate, 1) if "tokens" in one else ""),
        "load": Text(load(one)),
        "seen": Text(
            "" if age_s is None else f"{age_s:.1f} s", style="yellow" if age_s and age_s > LATE_S else "dim"
        ),
    }


def text(value: Any, style: str) -> Text:
    return Text("" if value is None else printable(str(value)), style=style)


def load(one: Snapshot) -> str:
    """Return a batcher's waiting requests, a gateway's open streams or a broker's commands per second."""
    figures = (
        (one.get("waiting"), "waiting"),
        (one.get("streams"), "stream" if one.get("streams") == 1 else "streams"),
        (one.get("commands_per_s"), "ops/s"),
    )
    return ", ".join(f"{number(value)} {unit}" for value, unit in figures if value is not None)


def share(used: float | None, limit: float | None, wide: bool) -> Text:
    if used is None:
        return Text()
    if not limit:
        return Text(number(used))
    figures = f"{number(used)}/{number(limit)}"
    return Text.assemble(bar(used / limit), " ", figures) if wide else Text(figures)


def bar(part: float, cells: int = 8) -> Text:
    """`██▌·····`, to an eighth of a cell; a value above 0 fills at least one eighth."""
    full, rest = divmod(round(min(1.0, max(0.0, part)) * cells * 8) or int(part > 0), 8)
    filled = "█" * full + (" ▏▎▍▌▋▊▉"[rest] if rest else "")
    return Text.assemble(
        (filled, "green" if part < NEARLY_FULL else "yellow"), ("·" * (cells - len(filled)), "dim")
    )


def number(value: float | None, digits: int = 0) -> str:
    return "–" if value is None else f"{value:,.{digits}f}".replace(",", " ")
