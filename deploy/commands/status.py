"""`tokenfleet status`: a table of the fleet's processes, live in a terminal, once for everybody else."""

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

from common.settings.flags import FlagParser
from deploy.commands.client import Trouble, add_url, api_key, check, complain, explained, harmless, new_client

ANSWER_S = 5.0
REFRESH_S = 1.0
NUM_LOOKS = 4
"""Rates are differences over so many looks: one heartbeat more or less does not show in them."""
LATE_S = 2.0
NEARLY_FULL = 0.9
WIDE, MEDIUM, SMALL = 118, 72, 56
STYLES = {
    "ready": "green",
    "active": "green",
    "standby": "cyan",
    "starting": "yellow",
    "draining": "yellow",
    "dead": "red",
}
KINDS = ("broker", "gateway", "batcher", "worker", "jobworker")

Snapshot = dict[str, Any]
"""The answer of GET /fleet. Any key may be absent."""


def main(argv: Sequence[str]) -> int:
    """Returns 0 when at least one worker is ready. Raises SettingError for flags that are not ours."""
    parser = FlagParser(
        prog="tokenfleet status", allow_abbrev=False, description="One line for every process of the fleet."
    )
    add_url(parser)
    parser.add_argument(
        "--once", action="store_true", help="print one table and end (as when the output is no terminal)"
    )
    parser.add_argument("--json", action="store_true", help="print GET /fleet with rates, and end")
    flags = parser.parse_args(list(argv))
    console = Console()
    try:
        with new_client(httpx.Client, flags.url, ANSWER_S, api_key()) as client:
            looks = deque([look(client)], maxlen=NUM_LOOKS)
            if flags.json or flags.once or not console.is_terminal:
                once(client, looks, console, flags.json)
            else:
                watch(client, looks, console)
    except Trouble as trouble:
        return complain(trouble)
    return 0 if num_ready(looks[-1]) else 1


def look(client: httpx.Client) -> Snapshot:
    """The fleet as it is now. Raises Trouble."""
    with explained(str(client.base_url)):
        answer = client.get("/fleet")
    check(answer.status_code, answer.content)
    try:
        fleet = orjson.loads(answer.content)
    except orjson.JSONDecodeError:
        fleet = None
    if (
        not isinstance(fleet, dict)
        or not isinstance(fleet.get("processes"), list)
        or not all(isinstance(one, dict) for one in fleet["processes"])
    ):
        raise Trouble(f"{client.base_url} answers /fleet, but not as a Tokenfleet does")
    return fleet


def once(client: httpx.Client, looks: deque[Snapshot], console: Console, as_json: bool) -> None:
    time.sleep(REFRESH_S)  # a rate needs two looks
    looks.append(look(client))
    if as_json:
        console.out(orjson.dumps(with_rates(looks), option=orjson.OPT_INDENT_2).decode(), highlight=False)
    else:
        console.print(view(looks, console.width))


def watch(client: httpx.Client, looks: deque[Snapshot], console: Console) -> None:
    """Until Ctrl-C. A fleet that does not answer is asked again."""
    with (
        contextlib.suppress(KeyboardInterrupt),
        Live(console=console, auto_refresh=False, transient=False) as live,
    ):
        trouble = ""
        while True:
            live.update(view(looks, console.width, trouble), refresh=True)
            time.sleep(REFRESH_S)
            try:
                looks.append(look(client))
                trouble = ""
            except Trouble as error:
                trouble = str(error)


def num_ready(fleet: Snapshot) -> int:
    return sum(one.get("kind") == "worker" and one.get("state") == "ready" for one in fleet["processes"])


def with_rates(looks: Sequence[Snapshot]) -> Snapshot:
    """The last look, with "tokens_per_s" (null: not known yet) for every process that counts tokens, and for
    the fleet.
    """
    known = rates(looks)
    processes = [
        one | {"tokens_per_s": known.get(one.get("id"))} if "tokens" in one else one
        for one in looks[-1]["processes"]
    ]
    return looks[-1] | {"processes": processes, "tokens_per_s": total(known)}


def rates(looks: Sequence[Snapshot]) -> dict[Any, float]:
    """Tokens per second by process id, since the earliest look that shows the process."""
    found: dict[Any, float] = {}
    last = looks[-1]
    for fleet in reversed(looks):
        seconds = last.get("time_s", 0) - fleet.get("time_s", 0)
        then = {one.get("id"): one.get("tokens") for one in fleet["processes"]}
        for one in last["processes"]:
            before, after = then.get(one.get("id")), one.get("tokens")
            if seconds > 0 and before is not None and after is not None:
                found[one.get("id")] = max(0.0, (after - before) / seconds)
    return found


def total(known: dict[Any, float]) -> float | None:
    return sum(known.values()) if known else None


def view(looks: Sequence[Snapshot], width: int, trouble: str = "") -> RenderableType:
    known = rates(looks)
    parts: list[RenderableType] = [
        head(looks[-1], total(known), width),
        Text(),
        table(looks[-1], known, width),
    ]
    if trouble:
        parts += [Text(), Text(f"{trouble}; asking again", style="red")]
    return Group(*parts)


def head(fleet: Snapshot, rate: float | None, width: int) -> Text:
    requests = fleet.get("requests") or {}
    limit = f" of {number(requests['limit'])}" if requests.get("limit") else ""
    return Text.assemble(
        (harmless(str(fleet.get("model", "?"))), "bold"),
        (f"  pool {harmless(str(fleet.get('pool', '?')))}", "dim"),
        "   " if width >= WIDE else "\n",
        f"{number(requests.get('live'))} live, {number(requests.get('waiting'))} waiting",
        (limit, "dim"),
        ("   ", ""),
        (f"{number(rate, 1)} tokens/s", "bold green" if rate else ""),
    )


def table(fleet: Snapshot, known: dict[Any, float], width: int) -> Table:
    """One line per process. A narrow terminal sees fewer columns, and no bars."""
    shown = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name, least_width, justify in COLUMNS:
        if width >= least_width:
            shown.add_column(name, justify=justify, no_wrap=True, overflow="ellipsis")
    for one in sorted(fleet["processes"], key=place):
        cells = line(one, known.get(one.get("id")), width >= WIDE)
        shown.add_row(*(cells[name] for name, least_width, _ in COLUMNS if width >= least_width))
    return shown


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
"""Title, the least width of a terminal that shows it, side."""


def place(one: Snapshot) -> tuple[int, str]:
    kind = one.get("kind")
    return KINDS.index(kind) if kind in KINDS else len(KINDS), str(one.get("id", ""))


def line(one: Snapshot, rate: float | None, wide: bool) -> dict[str, Text]:
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
    return Text("" if value is None else harmless(str(value)), style=style)


def load(one: Snapshot) -> str:
    """What waits at a batcher, the streams that a gateway holds open, a broker's commands."""
    figures = (
        (one.get("waiting"), "waiting"),
        (one.get("streams"), "streams"),
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
    """`██▌·····`, to an eighth of a cell; what is not empty shows."""
    eighths = round(min(1.0, max(0.0, part)) * cells * 8) or int(part > 0)
    full, rest = divmod(eighths, 8)
    filled = "█" * full + (" ▏▎▍▌▋▊▉"[rest] if rest else "")
    return Text.assemble(
        (filled, "green" if part < NEARLY_FULL else "yellow"), ("·" * (cells - len(filled)), "dim")
    )


def number(value: float | None, digits: int = 0) -> str:
    return "–" if value is None else f"{value:,.{digits}f}".replace(",", " ")
