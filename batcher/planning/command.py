"""`tokenfleet plan`: how many workers hold a load, by the real scheduler and this fleet's own step times."""

import argparse
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

import orjson
from rich.console import Console
from rich.table import Table

from batcher.planning.forecast import FleetTargets, Forecast, forecasts
from batcher.planning.learn import learn
from batcher.planning.load_trace import TracedRequest, draw_trace, read_trace
from batcher.planning.step_costs import StepCosts
from common.process.logs import plural
from common.settings.flags import FlagParser
from common.settings.settings import SettingError

MAX_WORKERS = 1024
TITLES = "workers;first ms;p99;gap ms;p99;tokens/s;busy;refused;cost/h;/1M tokens".split(";")
PIPE_COLUMNS = 240

NEEDED = "needs --rps, --prompt-tokens and --output-tokens, or --trace FILE"
DESCRIPTION = """Say how many workers a load needs: the fleet's scheduler runs the load against simulated
workers, whose step times were learnt from a running fleet (--from URL, under load) or a file that --save
wrote. API_KEY is sent to the fleet."""


def main(argv: Sequence[str]) -> int:
    """Run the command. Returns 1 if no fleet of at most --max-workers holds the targets. Raises SettingError
    for a wrong flag.
    """
    flags = read_flags(argv)
    trace = trace_of(flags)
    costs = costs_of(flags)
    if flags.save:
        save(costs, flags.save)
    if not trace:
        print(f"learnt from {costs.num_steps} steps: {words_of(costs)}")
        return 0
    targets = FleetTargets(flags.first_token_p99, flags.gap_p99)
    found = list(forecasts(costs, trace, flags.max_workers, flags.cost_per_worker_hour))
    smallest = next((one for one in found if one.holds(targets)), None)
    if flags.json:
        print(orjson.dumps(as_json(costs, found, smallest), option=orjson.OPT_INDENT_2).decode())
    else:
        show(costs, trace, found, targets, smallest)
    return int(smallest is None)


def read_flags(argv: Sequence[str]) -> argparse.Namespace:
    parser = FlagParser(prog="tokenfleet plan", allow_abbrev=False, description=DESCRIPTION)
    add = parser.add_argument
    add("--trace", type=Path, metavar="FILE", help="JSON lines, Azure's CSV, or Mooncake's JSON lines")
    add("--rps", type=float, metavar="N", help="requests a second, at random times, instead of a trace")
    add("--prompt-tokens", type=int, metavar="N", help="mean length of prompts")
    add("--output-tokens", type=int, metavar="N", help="mean length of answers")
    add("--spread", type=float, default=0.5, metavar="SHARE", help="how far lengths differ (default: 0.5)")
    add("--duration", type=float, default=120.0, metavar="S", help="of the load (default: %(default)g)")
    add("--seed", type=int, default=1, metavar="N", help="of the load (default: %(default)s)")
    add("--from", dest="source", metavar="URL", help="a running fleet, to learn its step times")
    add("--learn-s", type=float, default=30.0, metavar="S", help="how long it is watched (default: 30)")
    add("--save", type=Path, metavar="FILE", help="write the step times")
    add("--step-times", type=Path, metavar="FILE", help="step times that --save wrote")
    add("--first-token-p99", type=float, metavar="MS", help="the target for the time to first token")
    add("--gap-p99", type=float, metavar="MS", help="the target for the time between two tokens")
    add("--cost-per-worker-hour", type=float, metavar="X", help="in any currency")
    add("--max-workers", type=int, default=8, metavar="N", help="the largest fleet (default: %(default)s)")
    add("--json", action="store_true", help="print JSON")
    flags = parser.parse_args(list(argv))
    check_flags(flags)
    return flags


def check_flags(flags: argparse.Namespace) -> None:
    """Raise SettingError for the first flag that is wrong or missing."""
    if bool(flags.source) == bool(flags.step_times):
        raise SettingError("--from", "or --step-times must say, one of them, where step times come from")
    drawn = (flags.rps, flags.prompt_tokens, flags.output_tokens)
    if flags.trace and any(it is not None for it in drawn):
        raise SettingError("--trace", "and --rps, --prompt-tokens or --output-tokens exclude each other")
    if not flags.trace and any(it is None for it in drawn) and not (flags.save and drawn == (None,) * 3):
        raise SettingError("--rps", NEEDED)
    names = ("rps", "prompt_tokens", "output_tokens", "duration", "learn_s", "first_token_p99", "gap_p99")
    for name in (*names, "cost_per_worker_hour"):
        value = getattr(flags, name)
        if value is not None and not 0 < value < float("inf"):
            raise SettingError(f"--{name.replace('_', '-')}", f"{value} is not more than 0")
    if not 0 <= flags.spread < 1:
        raise SettingError("--spread", f"{flags.spread} is not from 0 to less than 1")
    if not 1 <= flags.max_workers <= MAX_WORKERS:
        raise SettingError("--max-workers", f"{flags.max_workers} is not from 1 to {MAX_WORKERS}")


def trace_of(flags: argparse.Namespace) -> list[TracedRequest]:
    """Return the load; empty if step times are only to be saved."""
    if flags.trace:
        return read_trace(flags.trace)
    if flags.rps is None:
        return []
    lengths = flags.prompt_tokens, flags.output_tokens
    found = draw_trace(flags.rps, flags.duration, *lengths, flags.spread, flags.seed)
    if not found:
        raise SettingError("--duration", f"no request comes within {flags.duration:g} s")
    return found


def costs_of(flags: argparse.Namespace) -> StepCosts:
    if flags.step_times:
        return StepCosts.read(flags.step_times)
    if not flags.source.startswith(("http://", "https://")):
        raise SettingError(
            "--from", f"{flags.source!r} is not the URL of a gateway, such as http://127.0.0.1:3000"
        )
    return learn(flags.source.rstrip("/"), flags.learn_s, os.environ.get("API_KEY"))


def save(costs: StepCosts, path: Path) -> None:
    try:
        costs.write(path)
    except OSError as error:
        raise SettingError("--save", f"{path} cannot be written: {error.strerror}") from error


def words_of(costs: StepCosts) -> str:
    return (
        f"a step takes {costs.step_ms:.3g} ms, {costs.row_ms:.3g} ms more for each row and "
        f"{costs.prompt_token_ms:.3g} ms for each prompt token; the way to the client {costs.hop_ms:.3g} ms"
    )


def show(
    costs: StepCosts,
    trace: Sequence[TracedRequest],
    found: Iterable[Forecast],
    targets: FleetTargets,
    smallest: Forecast | None,
) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = PIPE_COLUMNS
    console.print(f"{plural(len(trace), 'request')} in {trace[-1].arrival_ms / 1e3:.0f} s; {costs.source}:")
    console.print(words_of(costs))
    console.print(table_of(found, targets))
    wanted = [
        f"{name} p99 of {bound:g} ms"
        for name, bound in (("first token", targets.first_token_p99_ms), ("gap", targets.gap_p99_ms))
        if bound is not None
    ]
    if wanted and smallest:
        console.print(f"{plural(smallest.workers, 'worker')} hold {' and '.join(wanted)}")
    elif wanted:
        console.print(f"no fleet of this size holds {' and '.join(wanted)}: --max-workers tries larger ones")


def table_of(found: Iterable[Forecast], targets: FleetTargets) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in TITLES:
        table.add_column(title, justify="right")
    for one in found:
        cells = [
            str(one.workers),
            f"{one.first_token_p50_ms:.0f}",
            f"{one.first_token_p99_ms:.0f}",
            f"{one.gap_p50_ms:.1f}",
            f"{one.gap_p99_ms:.1f}",
            f"{one.tokens_per_s:.1f}",
            f"{one.utilisation:.0%}",
            str(one.refused),
        ]
        costs = (one.cost_per_hour, one.cost_per_million)
        cells += ["–" if cost is None else f"{cost:.2f}" for cost in costs]
        table.add_row(*cells, style=None if one.holds(targets) else "dim")
    return table


def as_json(costs: StepCosts, found: Iterable[Forecast], smallest: Forecast | None) -> dict[str, object]:
    return {
        "step_times": asdict(costs),
        "fleets": [asdict(one) for one in found],
        "workers": smallest.workers if smallest else None,
    }
